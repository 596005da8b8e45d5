// Rows of groups, and no more than that.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

struct Params : Product {
  Groups groups;
};
