// A slot of the ring: what one k-block of a tile needs of A and B, and their scales.
#pragma once
#include "config.cuh"
#include "types.cuh"

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows: 1024 bytes, to which their addresses are aligned.
constexpr uint32_t kABytes = kBlockM * kLineBytes, kBBytes = kBlockN * kLineBytes;
// How many values of B a byte has that TMA brings, and the bytes of B where they land apart.
constexpr uint32_t kPackedB = kLineBytes / kLoadedLineBytesOfB;
constexpr uint32_t kPackedBytes = ceil_div(kBlockN, kBoxRowsOfB) * kBoxRowsOfB * kLoadedLineBytesOfB;
// Scales of A's rows, of each part of the k-block that has its own, then those of B's rows if each has one: TMA writes to whole
// lines of 128 bytes. Behind them is what scaling warps write (CONVERT).
// (BF16 has none, but C++ has no empty arrays.)
constexpr uint32_t kScalesLoaded = kHasScales ? kScaleParts * kScaleRows + (kSfbIsPerRow ? kScalePartsOfB * kBlockN : 0) : 0;
constexpr uint32_t kScales = kHasScales ? ceil_div(kScalesLoaded + kScalesWritten, 32) * 32 : 1;
constexpr uint32_t kSlotBytes = kABytes + (kConvertWarps > 0 ? 0 : kBBytes) + kScalesLoaded * 4;

// One slot's parts in shared memory, and the barriers that count the bytes of them which land: of all, or of B apart.
struct Slot {
  uint64_t *full, *full_of_b;
  uint8_t *a, *b;
  float* scales;
};
