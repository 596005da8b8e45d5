// The simulator's model of the GPU, compiled once; kernels are linked to it.
#include <algorithm>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

#include "launch.h"
