// WGMMA, executed for one warp at a time (its 16 of the 64 rows). The schedule decides whether a product runs when it is
// issued or at the wait for it. Until the wait the kernel's registers are poison; the model keeps the true values.
#pragma once
#include <cmath>
#include <limits>

#include "warps.h"

namespace sim {

constexpr uint32_t kDepthBytes = 32, kMaximumDepth = 32, kRowsPerWarp = 16, kMaximumN = 256;

constexpr uint32_t kExponentBitsOfA = 4;

// Returns the numbers of all 256 bytes of an FP8 type.
inline const double* fp8(uint32_t exponent_bits) { return machine->launch.fp8[exponent_bits]; }

// Returns the exponent of FP8's smallest normal number.
inline int64_t least_exponent_of_fp8(uint32_t exponent_bits) { return 2 - (1 << (exponent_bits - 1)); }

inline double decode_bf16(const uint8_t* bytes) {
  const uint32_t bits = uint32_t{bytes[0]} << 16 | uint32_t{bytes[1]} << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The position of an operand. (PTX ISA, "Matrix Descriptor Format", "Strides".) A row is one span of the swizzle: elements
// along k if the operand is K-major, along m or n if it is MN-major.
struct Operand {
  bool is_bf16, is_mn_major;
  const double* numbers;  // of FP8
  uint32_t address, leading_bytes, stride_bytes, span_bytes;

  Operand(const ProductKind& kind, bool is_mn_major_, uint32_t exponent_bits, uint64_t descriptor, uint32_t rows,
          const char* name)
      : is_bf16(kind.is_bf16), is_mn_major(is_mn_major_), numbers(fp8(exponent_bits)) {
    const auto field = [descriptor](uint32_t bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
    address = field(0), leading_bytes = field(16), stride_bytes = field(32);
    const auto mode = static_cast<uint32_t>(descriptor >> 62);
    span_bytes = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 0;
    const std::string who = std::string(kind.name) + ": the descriptor of " + name;
    if (!span_bytes) fail(who + " has no swizzle, which is not modelled");
    if (is_mn_major && span_bytes != 128) fail(who + " has an MN-major swizzle below 128 bytes, which is not modelled");
    if (descriptor >> 49 & 7) fail(who + " has a base offset, which is not modelled");
    if (address >> 7 & (span_bytes / 16 - 1))
      fail(who + ": address " + text(address) + " does not lie in the first row of a swizzle atom of " +
           text(span_bytes * 8) + " bytes");
    if (is_mn_major && address % span_bytes) fail(who + ": address " + text(address) + " is not the first of its row");
    const uint64_t end = is_mn_major ? uint64_t{place(rows - 1, kind.depth() - 1)} + 2
                                     : address + uint64_t{rows / 8 - 1} * stride_bytes + 7 * span_bytes + kDepthBytes;
    if (address < kSharedBase || end > kSharedBase + machine->launch.shared_bytes)
      fail(who + " reaches from " + text(address) + " to " + text(end) + " of shared memory, which lies from " +
           text(kSharedBase) + " to " + text(kSharedBase + machine->launch.shared_bytes));
  }

  // Returns the address of an element of an MN-major operand, before the swizzle.
  uint32_t place(uint32_t index, uint32_t k) const {
    const uint32_t elements = span_bytes / 2;
    return address + index / elements * leading_bytes + k / 8 * stride_bytes + k % 8 * span_bytes + index % elements * 2;
  }

  const uint8_t* at(const Cta* cta, uint32_t linear) const { return cta->async + swizzle(linear, span_bytes) - kSharedBase; }

  void row(const Cta* cta, uint32_t index, double* values) const {
    if (is_mn_major) {
      for (uint32_t k = 0; k < kDepthBytes / 2; ++k) values[k] = decode_bf16(at(cta, place(index, k)));
      return;
    }
    const uint32_t start = address + index / 8 * stride_bytes + index % 8 * span_bytes;
    for (uint32_t byte = 0; byte < kDepthBytes; byte += 16) {
      const uint8_t* chunk = at(cta, start + byte);
      if (is_bf16)
        for (uint32_t i = 0; i < 8; ++i) values[byte / 2 + i] = decode_bf16(chunk + i * 2);
      else
        for (uint32_t i = 0; i < 16; ++i) values[byte + i] = numbers[chunk[i]];
    }
  }
};

inline int64_t exponent_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, 8);
  return (bits >> 52 & 0x7ff) - 1023;
}

// `exponent` must be from -1022 to 1023.
inline double power_of_two(int64_t exponent) {
  const int64_t bits = (exponent + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, 8);
  return value;
}

// Hopper's arithmetic, bit for bit (found and tested on an H200). All addends are aligned to the largest exponent among them.
// Each addend loses the bits more than `fraction_bits` below that exponent; then the sum loses the bits more than that below
// its own exponent. A product's exponent is the sum of its factors' stored exponents: a subnormal factor counts as the smallest
// normal number, and 1.5 * 1.5 counts as 2^0. Products that are zero do not count.
// Each loop runs over adjacent columns, so that the compiler uses vectors.
inline void add_truncated(const double* a, const double (*b)[kMaximumN], uint32_t n, uint32_t depth, int64_t fraction_bits,
                          int64_t least_of_a, int64_t least_of_b, double* sums) {
  static double totals[kMaximumN], to_units[kMaximumN];
  static int64_t largest[kMaximumN];
  constexpr int64_t kNone = -1023;
  for (uint32_t column = 0; column < n; ++column) largest[column] = sums[column] == 0 ? kNone : exponent_of(sums[column]);
  for (uint32_t k = 0; k < depth; ++k) {
    const double factor = a[k];
    const int64_t exponent_of_factor = std::max(exponent_of(factor), least_of_a);
    for (uint32_t column = 0; column < n; ++column) {
      const int64_t exponent = exponent_of_factor + std::max(exponent_of(b[k][column]), least_of_b);
      const int64_t of_product = factor * b[k][column] == 0 ? kNone : exponent;
      largest[column] = std::max(largest[column], of_product);
    }
  }
  for (uint32_t column = 0; column < n; ++column) {
    largest[column] = std::min(largest[column], int64_t{1024});
    to_units[column] = power_of_two(std::min(fraction_bits - largest[column], int64_t{1023}));
    totals[column] = 0;
  }
  for (uint32_t k = 0; k < depth; ++k)
    for (uint32_t column = 0; column < n; ++column) totals[column] += std::trunc(a[k] * b[k][column] * to_units[column]);
  const int64_t kept_bits = std::min(fraction_bits, int64_t{23});
  for (uint32_t column = 0; column < n; ++column) {
    const double total = totals[column] + std::trunc(sums[column] * to_units[column]);
    if (largest[column] == 1024)
      sums[column] = std::numeric_limits<double>::quiet_NaN();
    else if (total == 0)
      sums[column] = 0;
    else {
      const double value = total * power_of_two(largest[column] - fraction_bits);
      const double scale = power_of_two(kept_bits - exponent_of(value));
      sums[column] = std::trunc(value * scale) / scale;
    }
  }
}

// The sum of products is exact in double (for BF16 nearly). Adding it to the accumulator rounds once to FP32.
inline void execute(const Cta* cta, uint32_t warp, const Product& product) {
  static double a[kRowsPerWarp][kMaximumDepth], b[kMaximumDepth][kMaximumN], b_row[kMaximumDepth], sums[kMaximumN];
  const ProductKind& kind = product.kind;
  const uint32_t n = product.n, depth = kind.depth();
  const int64_t fraction_bits = kind.is_bf16 ? 25 : 13;
  const int64_t least_of_a = kind.is_bf16 ? -126 : least_exponent_of_fp8(kExponentBitsOfA);
  const int64_t least_of_b = kind.is_bf16 ? -126 : least_exponent_of_fp8(kind.exponent_bits_of_b);
  const Operand operand_b(kind, kind.b_is_mn_major, kind.exponent_bits_of_b, product.descriptor_b, n, "B");
  if (kind.has_registers) {
    // Register i of a lane: row lane / 4 + i % 2 * 8, columns lane % 4 * 4 + i / 2 * 16 and the next three.
    for (uint32_t row = 0; row < kRowsPerWarp; ++row)
      for (uint32_t k = 0; k < depth; ++k) {
        const uint32_t word = product.registers[k / 16 * 2 + row / 8][row % 8 * 4 + k % 16 / 4];
        a[row][k] = fp8(kExponentBitsOfA)[word >> k % 4 * 8 & 255];
      }
  } else {
    const Operand operand_a(kind, kind.a_is_mn_major, kExponentBitsOfA, product.descriptor_a, 64, "A");
    for (uint32_t row = 0; row < kRowsPerWarp; ++row) operand_a.row(cta, warp % 4 * kRowsPerWarp + row, a[row]);
  }
  for (uint32_t row = 0; row < n; ++row) {
    operand_b.row(cta, row, b_row);
    for (uint32_t k = 0; k < depth; ++k) b[k][row] = b_row[k];
  }
  float* values = product.d->values.data();
  for (uint32_t row = 0; row < kRowsPerWarp; ++row) {
    // Element i of a lane: column i / 4 * 8 + lane % 4 * 2 + i % 2 of row lane / 4 + i / 2 % 2 * 8.
    const auto element = [&](uint32_t column) -> float& {
      const uint32_t lane = row % 8 * 4 + column % 8 / 2;
      return values[lane * product.d->count + column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (uint32_t column = 0; column < n; ++column) sums[column] = product.accumulate ? element(column) : 0.0;
    if (machine->launch.truncate)
      add_truncated(a[row], b, n, depth, fraction_bits, least_of_a, least_of_b, sums);
    else
      for (uint32_t k = 0; k < depth; ++k) {
        const double factor = a[row][k];
        for (uint32_t column = 0; column < n; ++column) sums[column] += factor * b[k][column];
      }
    for (uint32_t column = 0; column < n; ++column) element(column) = static_cast<float>(sums[column]);
  }
  ++machine->stats.products;
}

inline void execute_until(uint64_t end) {
  Warp& warp = self->warp();
  while (!warp.products.empty() && warp.products.front().number < end) {
    execute(self->cta, self->thread / kLanes, warp.products.front());
    warp.products.pop_front();
  }
}

inline uint64_t issued_by_all_of_warpgroup(const Fiber& fiber) {
  const uint32_t first = fiber.thread / 128 * 4;
  uint64_t least = fiber.cta->warps[first].issued;
  for (uint32_t i = 1; i < 4; ++i) least = std::min(least, fiber.cta->warps[first + i].issued);
  return least;
}

inline void check_same_in_warpgroup(const ProductKind& kind, uint32_t n, uint64_t a, uint64_t b, bool accumulate) {
  const uint64_t number = self->warp().issued;
  auto& log = self->warpgroup().log;
  if (number == log.size()) log.push_back({kind, a, b, n, accumulate});
  const auto& first = log[number];
  if (first.kind != kind || first.a != a || first.b != b || first.n != n || first.accumulate != accumulate)
    fail(std::string(kind.name) + ": product " + text(number) + " of this warp has other operands than the same product of " +
         "another warp of its warpgroup");
}

inline void issue(const ProductKind& kind, float* d, uint32_t n, uint64_t a, uint64_t b, bool accumulate,
                  const uint32_t* registers = nullptr) {
  const char* what = kind.name;
  const std::string name = what;
  yield();
  Warp& warp = self->warp();
  if (self->thread / 128 * 128 + 128 > machine->launch.threads) fail(name + ": a warpgroup without 4 warps");
  auto* lane0 = reinterpret_cast<float*>(gather(what, reinterpret_cast<uint64_t>(d))[0]);
  const uint64_t other_a = gather(what, a)[0];
  Accumulators& held = warp.in_flight[lane0];
  if (!held.count) held.count = n / 2, held.values.resize(kLanes * n / 2);
  if (held.count != n / 2) fail(name + ": accumulators of another product in flight");
  if (!(held.saved >> self->lane() & 1)) {
    held.saved |= 1u << self->lane();
    held.registers[self->lane()] = d;
    std::memcpy(&held.values[self->lane() * n / 2], d, n / 2 * 4);
    std::memset(d, kPoison, n / 2 * 4);
  }
  const uint64_t other_b = gather(what, b)[0];
  if (a != other_a || b != other_b) fail(name + ": operands differ between the lanes of a warp");
  Product product{&held, kind, n, a, b, accumulate, 0};
  if (registers)
    for (uint32_t i = 0; i < 4; ++i) {
      const auto& of_lanes = gather(what, registers[i]);
      for (uint32_t lane = 0; lane < kLanes; ++lane) product.registers[i][lane] = static_cast<uint32_t>(of_lanes[lane]);
    }
  if (self->lane() != 0) return;

  const auto back = warp.handed_back.find(lane0);
  if (warp.fences == (back == warp.handed_back.end() ? 0 : back->second))
    fail(name + " without wgmma_fence since its accumulators were last touched");
  check_same_in_warpgroup(kind, n, a, b, accumulate);
  held.last_product = warp.issued;
  product.number = warp.issued++;
  warp.products.push_back(product);
  wake(self->warpgroup().waiting);
  const bool may_run = !machine->bias.whole_warpgroup || issued_by_all_of_warpgroup(*self) >= warp.issued;
  if (machine->bias.early_products && may_run && !one_in(4)) execute_until(warp.issued);
}

void wgmma_m64k32_e4m3(float* d, uint32_t n, uint64_t a, uint64_t b, bool accumulate, uint32_t exponent_bits_of_b) {
  issue({"wgmma_m64k32_e4m3", false, false, false, false, exponent_bits_of_b}, d, n, a, b, accumulate);
}

void wgmma_registers_m64k32_e4m3(float* d, uint32_t n, const uint32_t* a, uint64_t b, bool accumulate) {
  issue(kE4m3OfRegisters, d, n, 0, b, accumulate, a);
}

void wgmma_m64k16_bf16(float* d, uint32_t n, uint64_t a, uint64_t b, bool accumulate, bool a_is_mn_major, bool b_is_mn_major) {
  issue({"wgmma_m64k16_bf16", true, a_is_mn_major, b_is_mn_major}, d, n, a, b, accumulate);
}

void wgmma_wait_group(uint32_t pending) {
  const char* what = "wgmma_wait_group";
  yield();
  gather(what, pending);
  Warp& warp = self->warp();
  if (self->lane() == 0 && warp.groups.size() > pending) {
    const uint64_t end = warp.groups[warp.groups.size() - 1 - pending];
    if (machine->bias.whole_warpgroup)
      while (issued_by_all_of_warpgroup(*self) < end)
        block(self->warpgroup().waiting,
              {what, [] { return std::string("for other warps of its warpgroup to issue the same products"); }});
    execute_until(end);
    for (auto entry = warp.in_flight.begin(); entry != warp.in_flight.end();) {
      const Accumulators& held = entry->second;
      if (held.last_product >= end) {
        ++entry;
        continue;
      }
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        std::memcpy(held.registers[lane], &held.values[lane * held.count], held.count * 4);
      warp.handed_back[entry->first] = warp.fences;
      entry = warp.in_flight.erase(entry);
    }
    warp.groups.erase(warp.groups.begin(), warp.groups.end() - pending);
  }
  gather(what, pending);
}

}  // namespace sim

namespace ptx {

void wgmma_fence() {
  yield();
  gather("wgmma_fence", 0);
  if (self->lane() == 0) ++self->warp().fences;
}

void wgmma_commit_group() {
  yield();
  gather("wgmma_commit_group", 0);
  if (self->lane() == 0) self->warp().groups.push_back(self->warp().issued);
}

}  // namespace ptx
