"""Casts of tensors to FP8 values with FP32 scales. A scale is for columns of a row, rows of a column, or a block.

All casts share these rules. A scale is the block's largest finite magnitude divided by 448, the largest E4M3 value, so
that every finite input fits. Each element that is an infinity or a NaN, of either sign, becomes E4M3's NaN, the byte
0x7F, so that overflow stays visible. Such elements do not change the scale. A block without a finite non-zero value has
scale 1. No scale is below 2^-126, the smallest normal FP32 number. `use_ue8m0` rounds scales up to powers of two.
`min_amax`, rounded to FP32, replaces a block's largest magnitude if that is smaller, in blocks of zeros too.
FP64 input is first rounded to FP32, so values beyond FP32's range become infinities. Casts have no gradient: in grad
mode, they refuse a tensor that was computed from a tensor with a gradient.
"""
