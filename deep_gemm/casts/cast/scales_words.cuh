// Scales that are powers of two, as UE8M0: the exponent alone, a byte. Four lie in a word, the first in its lowest byte.
#pragma once

constexpr uint32_t kScalesOfWord = 4;

// Rows of groups have no scales in words, so the third argument has no name.
DEVICE void store_scale(const CastParams& p, uint32_t row, uint32_t, uint32_t block, float scale) {
  uint8_t* word = scale_at(p.scales, row, p.scales_stride_m, block / kScalesOfWord, p.scales_stride_k);
  ptx::st_global_b8(word + block % kScalesOfWord, ptx::bits_of(scale) >> 23);
  // Zeros fill up a row's last word.
  if (block + 1 < ceil_div(p.k, kBlock)) return;
  for (uint32_t i = block % kScalesOfWord + 1; i < kScalesOfWord; ++i) ptx::st_global_b8(word + i, 0);
}
