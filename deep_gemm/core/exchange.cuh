// The sum over a cluster. Each of its CTAs has accumulated the same tile over its own part of k.
//
// Every CTA adds up an equal share of the tile, always in the order of the senders, so the bits are the same each time.
// A share consists of chunks. A chunk is four accumulators of each lane of a warp: 16 rows by 8 columns, 512 bytes.
//
//   chunk number                quad of accumulators * kNumMathWarps + warp
//   added up by                 CTA chunk / chunks_per_cta
//   shared memory of that CTA   exchange[sender][chunk % chunks_per_cta][lane], 16 bytes each
//
// A warp writes and reads whole rows of 512 bytes, without bank conflicts. Arriving bytes complete a phase of the
// mbarrier `received`, so a CTA waits only for the chunks it adds. A CTA may exit once it has sent and added: receivers
// stay until everything has arrived. Before `send_chunks`, all CTAs must have initialized their mbarriers and called
// `expect_chunks`, and then a cluster barrier is needed.
//
// Without a cluster, the teams of a CTA "send" their sums to its own memory. Then a barrier of the CTA must follow.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

constexpr uint32_t kChunkFloats = 32 * 4;

DEVICE_CONSTEXPR uint32_t chunks_of_tile(uint32_t accumulators) { return accumulators / 4 * kNumMathWarps; }
DEVICE_CONSTEXPR uint32_t chunks_per_cta(uint32_t accumulators) {
  return ceil_div(chunks_of_tile(accumulators), kClusterK);
}
// `senders`: the number of CTAs, or of teams if each team has its own sums. They are numbered in the order of k.
DEVICE_CONSTEXPR uint32_t exchange_floats(uint32_t accumulators, uint32_t senders = kClusterK) {
  return senders * chunks_per_cta(accumulators) * kChunkFloats;
}

DEVICE uint32_t chunks_of_rank(uint32_t accumulators, uint32_t rank) {
  const uint32_t first = rank * chunks_per_cta(accumulators), chunks = chunks_of_tile(accumulators);
  if (first >= chunks) return 0;
  return chunks - first < chunks_per_cta(accumulators) ? chunks - first : chunks_per_cta(accumulators);
}

// Announces the bytes that this CTA will receive. One thread calls it, once for each use of `exchange`.
template <uint32_t kAccumulators, uint32_t kSenders = kClusterK>
DEVICE void expect_chunks(uint64_t* received, uint32_t rank) {
  ptx::mbarrier_arrive_expect_tx(received, kSenders * chunks_of_rank(kAccumulators, rank) * kChunkFloats * 4);
}

// Sends four sums of each lane of a warp to the CTA that adds up this chunk. `sender` is this sender's number. `first`
// is the cluster rank of the CTA that counts as CTA 0.
template <uint32_t kAccumulators>
DEVICE void send_chunk(float* exchange, uint64_t* received, uint32_t sender, uint32_t first, uint32_t chunk, uint32_t lane,
                       float x, float y, float z, float w) {
  constexpr uint32_t kChunks = chunks_per_cta(kAccumulators);
  float* to = exchange + (sender * kChunks + chunk % kChunks) * kChunkFloats + lane * 4;
  if constexpr (kClusterK > 1)
    ptx::st_async_v4_f32(to, received, first + chunk / kChunks, x, y, z, w);
  else
    ptx::st_shared_v4_b32(to, ptx::bits_of(x), ptx::bits_of(y), ptx::bits_of(z), ptx::bits_of(w));
}

// Sends all of a warp's sums. This CTA also sends its own share to itself, so that the addition has no special case.
template <uint32_t kAccumulators>
DEVICE void send_chunks(const float (&total)[kAccumulators], float* exchange, uint64_t* received, uint32_t sender,
                        uint32_t first, uint32_t warp, uint32_t lane) {
#pragma unroll
  for (uint32_t i = 0; i < kAccumulators; i += 4)
    send_chunk<kAccumulators>(exchange, received, sender, first, i / 4 * kNumMathWarps + warp, lane, total[i], total[i + 1],
                              total[i + 2], total[i + 3]);
}

// Adds up one chunk of this CTA's share from all senders.
template <uint32_t kAccumulators, uint32_t kSenders = kClusterK>
DEVICE ptx::Float4 sum_chunk(const float* exchange, uint32_t chunk_of_cta, uint32_t lane) {
  const float* from = exchange + chunk_of_cta * kChunkFloats + lane * 4;
  ptx::Float4 sum = ptx::ld_shared_v4_f32(from);
#pragma unroll
  for (uint32_t sender = 1; sender < kSenders; ++sender) {
    const ptx::Float4 addend = ptx::ld_shared_v4_f32(from + sender * chunks_per_cta(kAccumulators) * kChunkFloats);
    sum.x += addend.x, sum.y += addend.y, sum.z += addend.z, sum.w += addend.w;
  }
  return sum;
}
