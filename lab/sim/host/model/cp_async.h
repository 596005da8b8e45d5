// cp.async: copies from global to shared memory without registers. The destination is poison until the thread has
// waited for the copy.
#pragma once
#include "global_memory.h"
#include "shared_memory.h"

namespace ptx {

void cp_async_16_or_zeros(void* shared, const void* global, bool is_there) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(global);
  if (address % 16) fail("cp_async_16: the address is not a multiple of 16: " + describe_address(address));
  Copy copy{shared_offset(shared, 16, 16, "cp_async_16"), {}, self->copy_groups};
  for (uint32_t i = 0; i < 16 && is_there; ++i)
    copy.bytes[i] = *global_access(static_cast<const uint8_t*>(global) + i, 1, false, "cp_async_16");
  poison(self->cta, {copy.offset, 16});
  self->copies.push_back(copy);
}

void cp_async_16(void* shared, const void* global) { cp_async_16_or_zeros(shared, global, true); }

void cp_async_commit() {
  yield();
  ++self->copy_groups;
}

// Until all groups but the newest are there; copies that are not committed may still be on their way.
void cp_async_wait_groups(uint32_t groups) {
  yield();
  auto copy = self->copies.begin();
  for (; copy != self->copies.end() && copy->group + groups < self->copy_groups; ++copy) shared_store(copy->offset, copy->bytes, 16);
  self->copies.erase(self->copies.begin(), copy);
}

void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait_groups(0);
}

}  // namespace ptx
