// A slot of the ring holds one k-block of a tile's A and B, and their scales.
#pragma once
#include "config.cuh"
#include "types.cuh"

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows. Addresses are aligned to an atom, 1024 bytes.
constexpr uint32_t kABytes = kBlockM * kLineBytes, kBBytes = kBlockN * kLineBytes;
// Values of B in a byte that TMA loads, and the bytes of B that are counted by a separate barrier.
constexpr uint32_t kPackedB = kLineBytes / kLoadedLineBytesOfB;
constexpr uint32_t kPackedBytes = ceil_div(kBlockN, kBoxRowsOfB) * kBoxRowsOfB * kLoadedLineBytesOfB;
// Scales of A's rows for each part of the k-block, then scales of B's rows if each row has its own. TMA writes to whole
// lines of 128 bytes. Scaling warps (CONVERT) write after these scales.
// (BF16 has no scales, but C++ has no empty arrays.)
constexpr uint32_t kScalesLoaded = kHasScales ? kScaleParts * kScaleRows + (kSfbIsPerRow ? kScalePartsOfB * kBlockN : 0) : 0;
constexpr uint32_t kScales = kHasScales ? ceil_div(kScalesLoaded + kScalesWritten, 32) * 32 : 1;
constexpr uint32_t kSlotBytes = kABytes + (kConvertWarps > 0 ? 0 : kBBytes) + kScalesLoaded * 4;

// One slot's parts in shared memory, and the barriers that count arriving bytes: of all parts, or of B separately.
struct Slot {
  uint64_t *full, *full_of_b;
  uint8_t *a, *b;
  float* scales;
};
