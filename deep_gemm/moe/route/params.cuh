// What count_routes and route_rows are told, which is the same, and where the id of a route is.
#pragma once
#include "routes.cuh"

struct RouteParams {
  const uint8_t* topk_ids;  // [tokens, topk], of kIdBytes; ids of a token lie beside each other
  int32_t *counts, *ends;   // [experts]
  int32_t* row_of;          // [tokens, topk], -1: no expert
  int32_t *token_of, *ids;  // [tokens * topk], -1 behind the last row
  uint32_t num_routes, topk;
  uint32_t gap;                 // ids between the last of a token and the first of the next
  uint32_t first, num_experts;  // the id that counts as expert 0; as many experts from there on
  uint32_t* of_parts;           // [parts, experts]: routes of each expert in each part; null if there is one kernel alone
};
#include "route_params_layout.cuh"  // asserts that it lies as core/params.py packs it

constexpr ptx::Uint2 kNoId = {kNoExpert, 0};

DEVICE uint32_t expert_of(const RouteParams& p, const ptx::Uint2& id) { return expert_of(id, p.first, p.num_experts); }

// Where a route's id is. Routes kNumThreads apart follow each other by additions: divisions would take longer than loads.
struct Place {
  uint64_t at;        // among the ids
  uint32_t of_token;  // which of its token's routes

  DEVICE Place(const RouteParams& p, uint32_t route)
      : at(route + uint64_t{route / p.topk} * p.gap), of_token(route % p.topk) {}

  // `step` is the place of route kNumThreads.
  DEVICE void advance(const RouteParams& p, const Place& step) {
    at += step.at, of_token += step.of_token;
    if (of_token >= p.topk) of_token -= p.topk, at += p.gap;
  }

  DEVICE ptx::Uint2 id(const RouteParams& p) const { return load_id(p.topk_ids, at); }
};
