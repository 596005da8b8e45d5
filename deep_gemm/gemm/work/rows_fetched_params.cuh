// Rows of groups whose product is activated, and which the kernel itself fetches from where they lie on the ranks of a node.
#pragma once
#include "meeting.cuh"
#include "work/activation.cuh"
#include "work/layout.cuh"

struct Fetching {
  const int32_t* token_of;  // [rows]: a row's slot, -1 behind the last row
  const int32_t* row_of;    // [slots, topk]: the rows of a slot's routes, -1: none
  uint32_t* arrivals;       // [1 + parts]: rows that have been taken, and of each kRowsOfPart that have come; zeros before
  uint8_t* values;          // A: FP8 [rows, k]
  float* sfa;               // its scales [blocks of 128 columns, pitch]
  float* weights;           // [rows], or null
  uint64_t* addresses;      // [rows]: where the result of each goes, which a later kernel wants to know
  uint64_t results;         // byte of a room: BF16 [max_tokens, topk, k]
  uint32_t topk, row_bytes, weights_at, pitch, max_tokens;
  Meeting meeting;
};

struct Params : Product {
  Groups groups;
  Activation activation;
  Fetching fetching;
};
