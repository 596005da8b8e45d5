// Compiled with each kernel: how the model calls it.
#pragma once
#include <cstddef>
#include <type_traits>
#include <utility>

namespace sim {

template <typename... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Parameters*>(arguments[I])...);
}

template <typename... Parameters>
std::integral_constant<size_t, sizeof...(Parameters)> count_of(void (*)(Parameters...));

template <typename... Parameters>
size_t size_of(void (*)(Parameters...), size_t index) {
  const size_t sizes[] = {sizeof(Parameters)..., 0};
  return index < sizeof...(Parameters) ? sizes[index] : 0;
}

}  // namespace sim

#define SIM_EXPORT(kernel)                                                                            \
  extern "C" void sim_call_kernel(void** arguments) {                                                 \
    sim::call(kernel, arguments, std::make_index_sequence<decltype(sim::count_of(kernel))::value>()); \
  }                                                                                                   \
  extern "C" __attribute__((visibility("default"))) size_t sim_argument_bytes(size_t index) {         \
    return sim::size_of(kernel, index);                                                               \
  }
