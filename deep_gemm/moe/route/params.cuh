// The parameters that count_routes and route_rows share, and the position of a route's id.
#pragma once
#include "routes.cuh"

struct RouteParams {
  const uint8_t* topk_ids;  // [tokens, topk], of kIdBytes each; ids of one token are adjacent
  int32_t *counts, *ends;   // [experts]
  int32_t* row_of;          // [tokens, topk], -1: no expert
  int32_t *token_of, *ids;  // [tokens * topk], -1 after the last row
  uint32_t num_routes, topk;
  uint32_t gap;                 // ids between the last id of a token and the first id of the next
  uint32_t first, num_experts;  // the id of expert 0; the number of experts
  uint32_t* of_parts;           // [parts, experts]: routes of each expert in each part; null if count_routes does not run
};
#include "route_params_layout.cuh"  // asserts the layout that core/params.py packs

constexpr ptx::Uint2 kNoId = {kNoExpert, 0};

DEVICE uint32_t expert_of(const RouteParams& p, const ptx::Uint2& id) { return expert_of(id, p.first, p.num_experts); }

// The position of a route's id. A thread steps from route to route + kNumThreads by additions: divisions would take longer.
struct Place {
  uint64_t at;        // index among the ids
  uint32_t of_token;  // index among the routes of its token

  DEVICE Place(const RouteParams& p, uint32_t route)
      : at(route + uint64_t{route / p.topk} * p.gap), of_token(route % p.topk) {}

  // `step` is the position of route kNumThreads.
  DEVICE void advance(const RouteParams& p, const Place& step) {
    at += step.at, of_token += step.of_token;
    if (of_token >= p.topk) of_token -= p.topk, at += p.gap;
  }

  DEVICE ptx::Uint2 id(const RouteParams& p) const { return load_id(p.topk_ids, at); }
};
