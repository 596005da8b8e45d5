// cp.async: copies from global to shared memory without registers. The destination is poison until the thread has
// waited for the copy.
#pragma once
#include "global_memory.h"
#include "shared_memory.h"

namespace ptx {

void cp_async_16(void* shared, const void* global) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(global);
  if (address % 16) fail("cp_async_16: the address is not a multiple of 16: " + describe_address(address));
  Copy copy{shared_offset(shared, 16, 16, "cp_async_16"), {}};
  for (uint32_t i = 0; i < 16; ++i)
    copy.bytes[i] = *global_access(static_cast<const uint8_t*>(global) + i, 1, false, "cp_async_16");
  poison(self->cta, {copy.offset, 16});
  self->copies.push_back(copy);
}

void cp_async_wait_all() {
  yield();
  for (const Copy& copy : self->copies) shared_store(copy.offset, copy.bytes, 16);
  self->copies.clear();
}

}  // namespace ptx
