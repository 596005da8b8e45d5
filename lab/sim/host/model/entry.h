// Compiled with each kernel, so that the model can call it. Including <utility> would take a fifth of a small kernel's time.
#pragma once
#include <stddef.h>

namespace sim {

struct Call {
  template <typename... Parameters>
  Call(void (*kernel)(Parameters...), Parameters&... given) {
    kernel(given...);
  }
};

template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
  Call{kernel, *static_cast<Parameters*>(*arguments++)...};  // in braces, which evaluate from left to right
}

template <typename... Parameters>
size_t size_of(void (*)(Parameters...), size_t index) {
  const size_t sizes[] = {sizeof(Parameters)..., 0};
  return index < sizeof...(Parameters) ? sizes[index] : 0;
}

}  // namespace sim

#define SIM_EXPORT(kernel)                                                                            \
  extern "C" void sim_call_kernel(void** arguments) { sim::call(kernel, arguments); }                 \
  extern "C" __attribute__((visibility("default"))) size_t sim_argument_bytes(size_t index) {         \
    return sim::size_of(kernel, index);                                                               \
  }
