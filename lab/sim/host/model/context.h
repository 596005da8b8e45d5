// A fiber's saved registers and stack, and the switch between two of them.
#pragma once
#include <sys/mman.h>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#if !defined(__x86_64__) || defined(SIM_UCONTEXT)
#define SIM_PORTABLE_SWITCH
#include <ucontext.h>
#endif

namespace sim {

#ifndef SIM_PORTABLE_SWITCH

struct Context {
  void* stack_pointer = nullptr;
};

// Saves the registers that a callee must preserve by the System V ABI, and returns on the other stack.
extern "C" void sim_switch(void** save, void* to);
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
sim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

inline void switch_context(Context& from, Context& to) { sim_switch(&from.stack_pointer, to.stack_pointer); }

inline void prepare_context(Context& context, uint8_t* stack, size_t bytes, void (*entry)()) {
  // Makes the stack look as if `entry` had been called: aligned to 16 bytes minus the return address, six registers below.
  auto** top = reinterpret_cast<void**>(stack + bytes) - 2;
  *top = reinterpret_cast<void*>(entry);
  for (int i = 1; i <= 6; ++i) top[-i] = nullptr;
  context.stack_pointer = top - 6;
}

#else

struct Context {
  ucontext_t registers;
};
inline void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }
inline void prepare_context(Context& context, uint8_t* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

#endif

constexpr size_t kStackBytes = 256 << 10;

// The stacks of a launch's fibers. A page below each stack faults on overflow.
class Stacks {
 public:
  explicit Stacks(size_t count) : bytes_(count * kStackBytes) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<uint8_t*>(memory);
    for (size_t i = 0; i < count; ++i) mprotect((*this)[i], kGuardBytes, PROT_NONE);
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { munmap(memory_, bytes_); }

  uint8_t* operator[](size_t fiber) const { return memory_ + fiber * kStackBytes; }

 private:
  static constexpr size_t kGuardBytes = 4096;
  size_t bytes_;
  uint8_t* memory_;
};

}  // namespace sim
