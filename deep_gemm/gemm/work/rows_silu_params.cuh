// Rows of groups whose product is activated.
#pragma once
#include "work/activation.cuh"
#include "work/layout.cuh"

struct Params : Product {
  Groups groups;
  Activation activation;
};
