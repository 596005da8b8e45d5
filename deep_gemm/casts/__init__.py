"""Casts of ordinary tensors to FP8 values with FP32 scales, for one row, one column or one block at a time.

All casts share their rules. A scale is the block's largest finite magnitude over 448, the largest E4M3 value, so that
every finite input fits. An infinity or a NaN of either sign becomes E4M3's NaN, the byte 0x7F, in its own element, so
overflow survives. Neither influences the scale. A block without a finite non-zero value has scale 1. No scale is below
2^-126, the smallest normal FP32 number. With `use_ue8m0` a scale is rounded up to a power of two. With `min_amax`,
rounded to FP32, the block's largest magnitude counts as at least this, in blocks of zeros too. FP64 input is rounded to
FP32 first, so values beyond FP32's range count as infinities. Casts have no gradient: in grad mode they refuse a
tensor that was computed from one that requires a gradient.
"""
