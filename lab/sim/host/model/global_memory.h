// Global memory: only registered buffers exist. Every access is checked, even if the kernel does not use its value.
#pragma once
#include <cmath>

#include "peers.h"

namespace sim {

inline std::string describe_address(uint64_t address) {
  const Buffer* nearest = nullptr;
  uint64_t distance = ~0ull;
  for (uint32_t i = 0; i < machine->launch.num_buffers; ++i) {
    const Buffer& buffer = machine->launch.buffers[i];
    const uint64_t away = address < buffer.base                  ? buffer.base - address
                          : address >= buffer.base + buffer.bytes ? address - buffer.base - buffer.bytes + 1
                                                                  : 0;
    if (away < distance) distance = away, nearest = &buffer;
  }
  if (!nearest) return "there is no global memory";
  const std::string size = " (" + text(nearest->bytes) + " bytes)";
  if (address < nearest->base) return text(nearest->base - address) + " bytes before `" + nearest->name + "`" + size;
  if (address < nearest->base + nearest->bytes)
    return "byte " + text(address - nearest->base) + " of `" + nearest->name + "`" + size;
  return text(address - nearest->base - nearest->bytes) + " bytes past the end of `" + nearest->name + "`" + size;
}

inline const Buffer* find_buffer(uint64_t address, uint64_t bytes) {
  for (uint32_t i = 0; i < machine->launch.num_buffers; ++i) {
    const Buffer& buffer = machine->launch.buffers[i];
    if (address >= buffer.base && address < buffer.base + buffer.bytes && bytes <= buffer.base + buffer.bytes - address)
      return &buffer;
  }
  return nullptr;
}

inline const Buffer& check_global(uint64_t address, uint64_t bytes, bool writes, const Cta* cta, const char* what) {
  const Buffer* buffer = find_buffer(address, bytes);
  if (!buffer)
    fail(std::string(what) + (writes ? " writes " : " reads ") + text(bytes) +
         " bytes of global memory out of bounds: " + describe_address(address));
  if (writes && !buffer->is_writable) fail(std::string(what) + " writes to `" + buffer->name + "`, an input");
  if (buffer->is_dependent && !cta->dependency_resolved)
    fail(std::string(what) + " touches `" + buffer->name + "`, which the kernel before may still be using: no thread " +
         "of this block has passed griddepcontrol_wait yet");
  return *buffer;
}

inline uint8_t* global_access(const void* pointer, uint32_t bytes, bool writes, const char* what) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  check_global(address, bytes, writes, self->cta, what);
  if (address % bytes)
    fail(std::string(what) + ": the address is not a multiple of " + text(bytes) + ": " + describe_address(address));
  return reinterpret_cast<uint8_t*>(address);
}

template <typename T>
T global_load(const void* pointer, const char* what, bool is_nc = false) {
  yield();
  T value;
  std::memcpy(&value, global_access(pointer, sizeof(T), false, what), sizeof(T));
  if (machine->launch.other_ranks) {
    const auto address = reinterpret_cast<uint64_t>(pointer);
    const Buffer& buffer = *find_buffer(address, sizeof(T));
    check_no_news(buffer, address, sizeof(T), what);
    check_not_held(buffer, address, sizeof(T), what);
  }
  if (is_nc && find_buffer(reinterpret_cast<uint64_t>(pointer), sizeof(T))->is_writable)
    fail(std::string(what) + " reads memory that the kernel may write: " +
         describe_address(reinterpret_cast<uint64_t>(pointer)) + "; the .nc path is for constant data");
  return value;
}

inline void store_bytes(uint8_t* to, const void* bytes, uint32_t size, bool is_release) {
  const auto address = reinterpret_cast<uint64_t>(to);
  const Buffer& buffer = *find_buffer(address, size);
  if (is_of_peer(buffer)) return store_to_peer(buffer, address, bytes, size, is_release);
  std::memcpy(to, bytes, size);
  hold(buffer, address, size, static_cast<size_t>(self - machine->fibers.data()));
  if (uint8_t* news = news_at(buffer, address)) std::memset(news, 0, (size + 3) / 4);
}

template <typename T>
void global_store(void* pointer, const T& value, const char* what) {
  yield();
  store_bytes(global_access(pointer, sizeof(T), true, what), &value, sizeof(T), false);
}

// `order` updates the knowledge of the threads that use the word, in the same step in which the word changes.
template <typename Order>
uint32_t add_at_once(uint32_t* pointer, uint32_t value, const Order& order) {
  yield();
  auto* word = reinterpret_cast<uint32_t*>(global_access(pointer, 4, true, "atomic add"));
  if (is_of_peer(*find_buffer(reinterpret_cast<uint64_t>(word), 4))) fail("atomic add to another rank's memory");
  order(machine->counted[pointer]);
  const uint32_t before = *word;
  *word += value;
  wake(machine->waiting_for_count[pointer]);
  yield();
  return before;
}

}  // namespace sim

namespace ptx {

float ld_global_f32(const void* p) { return global_load<float>(p, "ld_global_f32"); }
Uint2 ld_global_v2_b32(const void* p) { return global_load<Uint2>(p, "ld_global_v2_b32"); }
Float2 ld_global_v2_f32(const void* p) { return global_load<Float2>(p, "ld_global_v2_f32"); }
Float4 ld_global_v4_f32(const void* p) { return global_load<Float4>(p, "ld_global_v4_f32"); }
uint32_t ld_global_b32(const void* p) { return global_load<uint32_t>(p, "ld_global_b32"); }
uint32_t ld_relaxed_gpu_b32(const void* p) { return global_load<uint32_t>(p, "ld_relaxed_gpu_b32"); }
uint32_t ld_global_b16(const void* p) { return global_load<uint16_t>(p, "ld_global_b16"); }
Uint4 ld_global_v4_b32(const void* p) { return global_load<Uint4>(p, "ld_global_v4_b32"); }
int32_t ld_global_i32(const void* p) { return global_load<int32_t>(p, "ld_global_i32"); }
float ld_global_nc_f32(const void* p) { return global_load<float>(p, "ld_global_nc_f32", true); }
int32_t ld_global_nc_i32(const void* p) { return global_load<int32_t>(p, "ld_global_nc_i32", true); }
uint32_t ld_global_nc_b16(const void* p) { return global_load<uint16_t>(p, "ld_global_nc_b16", true); }
uint32_t ld_global_nc_b32(const void* p) { return global_load<uint32_t>(p, "ld_global_nc_b32", true); }
Uint4 ld_global_nc_v4_b32(const void* p) { return global_load<Uint4>(p, "ld_global_nc_v4_b32", true); }
void st_global_b8(void* p, uint32_t value) { global_store(p, static_cast<uint8_t>(value), "st_global_b8"); }
void st_global_b16(void* p, uint32_t value) { global_store(p, static_cast<uint16_t>(value), "st_global_b16"); }
void st_global_f32(void* p, float value) { global_store(p, value, "st_global_f32"); }
void st_global_b32(void* p, uint32_t value) { global_store(p, value, "st_global_b32"); }
void st_global_v2_b32(void* p, uint32_t a, uint32_t b) { global_store(p, Uint2{a, b}, "st_global_v2_b32"); }
void st_global_v2_f32(void* p, float x, float y) { global_store(p, Float2{x, y}, "st_global_v2_f32"); }
void st_global_v4_f32(void* p, float x, float y, float z, float w) {
  global_store(p, Float4{x, y, z, w}, "st_global_v4_f32");
}
void st_global_v4_b32(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  global_store(p, Uint4{a, b, c, d}, "st_global_v4_b32");
}

uint32_t atom_add(uint32_t* p, uint32_t value) {
  return sim::add_at_once(p, value, [](sim::Known&) {});
}
// If there are other ranks, two ranks stand for two kernels on one GPU.
void red_release_gpu_add_b32(uint32_t* p, uint32_t value) {
  sim::add_at_once(p, value, [p](sim::Known& known) {
    sim::tell(known), sim::join(machine->counted_fenced[p], self->fenced);
    if (!machine->launch.other_ranks) return;
    release_own(known, machine->launch.rank ^ 1);
    const auto address = reinterpret_cast<uint64_t>(p);
    *news_at(*find_buffer(address, 4), address) = static_cast<uint8_t>(machine->launch.rank + 1) | kReleased;
  });
}
uint32_t ld_acquire_sys_b32(const uint32_t* p) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(global_access(p, 4, false, "ld_acquire_sys_b32"));
  acquire(*find_buffer(address, 4), address);
  return *p;
}
uint32_t ld_acquire_gpu_b32(const uint32_t* p) {
  machine->waits_for_rank = true;
  if (machine->launch.other_ranks) return ld_acquire_sys_b32(p);
  yield();
  const auto* word = reinterpret_cast<const uint32_t*>(global_access(p, 4, false, "ld_acquire_gpu_b32"));
  if (self->asked == std::pair<const void*, uint32_t>{p, *word})  // this thread polls the word
    block(machine->waiting_for_count[p], {"waits for another count than", [word] { return text(*word); }});
  self->asked = {p, *word};
  self->same_answers = self->seen == self->asked ? self->same_answers + 1 : 0;
  self->seen = self->asked;
  sim::learn(machine->counted[p]), sim::join(self->told_fenced, machine->counted_fenced[p]);
  return *word;
}
void fence_proxy_async_global() {
  self->fenced_at = machine->acquired;
  self->fenced = known_of(*self);
  join(self->for_tma, self->told_fenced);
  yield();
}
uint32_t atom_add_acq_rel_b32(uint32_t* p, uint32_t value) {
  return sim::add_at_once(p, value, [](sim::Known& known) { sim::tell(known), sim::learn(known); });
}
void st_release_sys_b32(uint32_t* p, uint32_t value) {
  yield();
  store_bytes(global_access(p, 4, true, "st_release_sys_b32"), &value, 4, true);
}
uint64_t global_timer() { return machine->now; }

float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
float mul_rn(float a, float b) { return a * b; }
float add_rn(float a, float b) { return a + b; }
// The hardware's results may differ by a unit or two in the last place.
float flush_to_zero(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
float ex2_approx(float x) { return flush_to_zero(std::exp2(x)); }
float rcp_approx(float x) { return flush_to_zero(1.f / flush_to_zero(x)); }
float lg2_approx(float x) { return std::log2(flush_to_zero(x)); }
uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> i * 4 & 15;
    if (digit > 7) fail("byte_perm: digit " + text(i) + " of the selector is " + text(digit));
    bytes |= (digit < 4 ? low >> digit * 8 & 255 : high >> (digit - 4) * 8 & 255) << i * 8;
  }
  return bytes;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
float min_nan(float a, float b) { return std::isnan(a) || a < b ? a : b; }
float min_magnitude(float x, float most) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
  return magnitude > 0x7f800000 || magnitude < bits_of(most) ? x : float_of(bits_of(most) | (bits & 0x80000000));
}
float abs_f32(float x) { return std::fabs(x); }
float max_f32(float a, float b) { return std::fmax(a, b); }
// E4M3 has a sign, 4 bits of exponent with a bias of 7, and 3 of mantissa; 0x7f is its NaN, 0x7e is 448.
uint32_t pack_e4m3(float low, float high) {
  const auto round = [](float value) -> uint32_t {
    const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    if (magnitude >= bits_of(448.f)) return sign | 0x7e;
    if (magnitude < bits_of(0.015625f)) {  // below 2^-6: multiples of 2^-9
      const float shifted = float_of(magnitude) + 16384.f;  // its last bit is 2^-9, so the addition rounds to 2^-9
      return sign | (bits_of(shifted) - bits_of(16384.f));
    }
    const uint32_t rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    const uint32_t code = (rounded >> 20) - (120 << 3);
    return sign | (code < 0x7e ? code : 0x7e);
  };
  return round(low) | round(high) << 8;
}
uint32_t pack_bf16(float low, float high) {
  const auto round = [](float value) -> uint32_t {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // the NaN of cvt
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
}
Float2 unpack_bf16(uint32_t packed) {
  const uint32_t halves[2] = {packed << 16, packed & 0xffff0000};
  Float2 v;
  std::memcpy(&v, halves, 8);
  return v;
}
Float2 unpack_f16(uint32_t packed) {
  const auto widen = [](uint32_t half) -> float {
    const uint32_t sign = (half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    const float value = float_of(magnitude << 13) * 0x1p112f;  // the exponents' biases differ by 112
    return float_of(sign | bits_of(value));
  };
  return {widen(packed & 0xffff), widen(packed >> 16)};
}

template <typename Unpack>
uint32_t max_of_halves(uint32_t a, uint32_t b, Unpack unpack, bool keeps_nan = false) {
  const auto is_larger = [&](float x, float y) { return std::isnan(keeps_nan ? x : y) || x > y; };
  const Float2 u = unpack(a), v = unpack(b);
  return ((is_larger(u.x, v.x) ? a : b) & 0xffff) | ((is_larger(u.y, v.y) ? a : b) & 0xffff0000);
}
uint32_t max_bf16x2(uint32_t a, uint32_t b) { return max_of_halves(a, b, unpack_bf16); }
uint32_t max_f16x2(uint32_t a, uint32_t b) { return max_of_halves(a, b, unpack_f16); }
float max_nan_f32(float a, float b) { return std::isnan(a) || a > b ? a : b; }
uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) { return max_of_halves(a, b, unpack_bf16, true); }
uint32_t max_nan_f16x2(uint32_t a, uint32_t b) { return max_of_halves(a, b, unpack_f16, true); }

}  // namespace ptx
