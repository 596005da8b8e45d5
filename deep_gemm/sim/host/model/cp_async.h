// Copies from global to shared memory that no register takes part in. What a thread has asked for is poison until it
// has waited for it.
#pragma once
#include "global_memory.h"
#include "shared_memory.h"

namespace ptx {

void cp_async_4(void* shared, const void* global) {
  const auto value = global_load<uint32_t>(global, "cp_async_4");
  const uint32_t offset = shared_offset(shared, 4, 4, "cp_async_4");
  poison(self->cta, {offset, 4});
  self->copies.push_back({offset, value});
}

void cp_async_wait_all() {
  yield();
  for (const Copy& copy : self->copies) shared_store(copy.offset, &copy.value, 4);
  self->copies.clear();
}

}  // namespace ptx
