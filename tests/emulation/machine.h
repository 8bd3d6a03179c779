// The machine that runs kernels on the CPU: every thread of a block is a fiber, which runs until it waits for others.
// Some blocks of a grid are there at once, and take turns: at barriers, fences and atomics, and between any two
// threads. Threads between two barriers, and blocks, run in an order that is shuffled anew each time: what relies on a
// barrier that is not there goes wrong.
#pragma once
#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned count = 1) : x(count) {}
};

namespace emulation {

constexpr int kWarp = 32;
enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone, kMissing };

static thread_local volatile char known = 0;

// The __shared__ variables lie together, in the module's thread-local memory.
struct SharedMemory {
  char* begin = nullptr;
  size_t bytes = 0;
  uintptr_t image_begin = 0, image_end = 0;  // of the module

  static SharedMemory find() {
    known = 1;  // the first access allocates
    SharedMemory found;
    const auto look = [](dl_phdr_info* info, size_t, void* to) {
      SharedMemory here;
      for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && here.image_begin == 0) here.image_begin = begin;
        if (part.p_type == PT_LOAD) here.image_end = begin + part.p_memsz;
        if (part.p_type == PT_TLS) here.begin = static_cast<char*>(info->dlpi_tls_data), here.bytes = part.p_memsz;
      }
      const volatile char* const end = here.begin + here.bytes;
      if (here.begin <= &known && &known < end) *static_cast<SharedMemory*>(to) = here;
      return 0;
    };
    dl_iterate_phdr(look, &found);
    return found;
  }
};

struct Thread {
  static constexpr size_t kStack = 128 << 10;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  State state = State::kDone;
  bool gave_up = false;  // in the middle of a kernel
};

// Memory whose writes other blocks see no earlier than they must: each block has it as it was at its last fence, and
// what it has written since.
struct Watched {
  char* at;
  std::vector<char> global;
};

struct View {
  std::vector<char> now, before;  // as the block has it, and had it at its last fence
};

// How many barriers of the block, and of its warp, a thread has come through.
struct Passed {
  int block = 0, warp = 0;
};

// An access of shared memory: by which thread, and when.
struct Access {
  int thread = -1;
  Passed passed;
};

// The last accesses of a byte of shared memory; `other_read` is by another thread than `read`, with no barrier between.
struct Accesses {
  Access write, read, other_read;
};

struct Block {
  unsigned index = 0;
  std::vector<Thread> threads;
  std::vector<unsigned> order;                // of the threads in this pass
  size_t next = 0;                            // of them
  bool ran = false;                           // one of them, in this pass
  int sleeper = -1;                           // the warp that does not run while others can
  std::vector<int> barriers_of, shuffles_of;  // how many each thread has come to
  std::vector<Passed> passed;                 // by each thread
  std::vector<char> shared;
  std::vector<Accesses> accesses;  // of each byte of it, where accesses are checked
  std::vector<View> views;         // of what is watched
  int fences = 0, tickets = 0;
  uint32_t exchanged[1024];
};

struct Launch {
  const void* stream;
  std::function<void()> run;
};

// What kernels go without, as if it were not written there: the index-th barrier or shuffle that each thread comes to
// (from a shuffle it gets its own number), the index-th fence or ticket of each block (which goes on as the last), one
// thread of each block. -1: nothing.
struct Missing {
  std::string of;  // kernels with a parameter whose type has this name; "": all
  int barrier = -1, shuffle = -1, thread = -1, fence = -1, ticket = -1;
  bool is_there = false, was_met = false;
};

// What tests set.
struct Setup {
  std::mt19937 shuffle{0};
  int multiprocessors = 3;
  Missing missing;
  std::vector<Watched> watched;
  std::map<uintptr_t, size_t> memory;  // the device's, address to bytes; empty: not known
  bool defers = false;                 // launches wait to be synchronized with
  std::vector<Launch> queue;
  int launches_until_failure = -1;
  uint64_t capture = 0;
  const void* capturing = nullptr;  // the stream whose launches a graph takes
  std::vector<Launch> captured;     // to be made again
  bool is_relaxed = false;          // what would spoil another thread's capture is allowed
  std::string trouble;              // CUDA's reason why nothing runs
};

struct Machine : Setup {
  static constexpr size_t kAtOnce = 32;
  std::vector<std::unique_ptr<Block>> blocks;  // as many as have been there at once; the running launch's come first
  bool is_faulty = false;                      // what is missing is missing in this kernel
  Block* running = nullptr;
  jmp_buf scheduler;
  void (*body)(const void*) = nullptr;  // the kernel, and its arguments
  const void* arguments = nullptr;
  size_t arguments_bytes = 0;
  SharedMemory shared;
  static inline bool in_kernel = false;
  std::string fault;  // what a kernel did wrong
  dim3 thread{0}, block{0}, grid{0};
  long launches = 0;
  bool stuck = false;
  bool offers = false;  // the running thread, to let other blocks go on

  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // Whether the kernel, which is faulty, goes without the one of this index.
  bool lacks(int Missing::* what, int index) {
    if (missing.*what != index) return false;
    return missing.was_met = true;
  }

  // Of the running thread: others go on. swapcontext() would ask the kernel for the signals each time.
  void wait(State state) {
    in_kernel = false;
    Thread& self = running->threads[thread.x];
    self.state = state;
    if (_setjmp(self.at) == 0) _longjmp(scheduler, 1);
  }

  void resume(Thread& next) {
    if (_setjmp(scheduler) == 0) _longjmp(next.at, 1);
  }

  // What a kernel may touch; its own variables lie on the thread's stack.
  bool allows(uintptr_t at, size_t bytes) const {
    const auto in = [&](const void* begin, size_t size) {
      const auto first = reinterpret_cast<uintptr_t>(begin);
      return at >= first && at + bytes <= first + size;
    };
    if (memory.empty() || in(running->threads[thread.x].stack.get(), Thread::kStack)) return true;
    if (in(shared.begin, shared.bytes) || in(arguments, arguments_bytes)) return true;
    if (at >= shared.image_begin && at + bytes <= shared.image_end) return true;
    const auto after = memory.upper_bound(at);
    if (after == memory.begin()) return false;
    const auto [begin, size] = *std::prev(after);
    return at + bytes <= begin + size;
  }

  bool is_in_warp(const Access& access) const { return access.thread / kWarp == int(thread.x) / kWarp; }

  // Whether an access lies before the running thread's next one, by a barrier that both have come through.
  bool is_before(const Access& access) const {
    if (access.thread < 0 || access.thread == int(thread.x)) return true;
    const Passed& own = running->passed[thread.x];
    return access.passed.block < own.block || (is_in_warp(access) && access.passed.warp < own.warp);
  }

  // The thread whose access of these bytes of shared memory races with the running thread's; -1: none does. Threads of
  // one warp may write one value to the same place.
  int races(uintptr_t at, size_t bytes, bool writes) {
    const auto first = reinterpret_cast<uintptr_t>(shared.begin);
    if (at < first || at + bytes > first + shared.bytes) return -1;
    if (running->accesses.empty()) running->accesses.resize(shared.bytes);
    const Access now{int(thread.x), running->passed[thread.x]};
    for (size_t i = at - first; i < at - first + bytes; ++i) {
      auto& [write, read, other_read] = running->accesses[i];
      if (!is_before(write) && !(writes && is_in_warp(write))) return write.thread;
      if (writes && !is_before(read)) return read.thread;
      if (writes && !is_before(other_read)) return other_read.thread;
      if (writes) write = now;
      else if (read.thread != now.thread) other_read = std::exchange(read, now);
      else read = now;
    }
    return -1;
  }

  bool is_captured(const void* stream) const { return capture != 0 && stream == capturing; }

  // Of one stream in order.
  void enqueue(const Launch& launch) {
    if (is_captured(launch.stream)) captured.push_back(launch);
    if (!defers) launch.run();
    else if (!is_captured(launch.stream)) queue.push_back(launch);
  }

  // Makes what waits on a stream.
  void finish(const void* stream) {
    for (size_t i = 0; i < queue.size();) {
      if (queue[i].stream != stream) {
        ++i;
        continue;
      }
      const Launch next = queue[i];
      queue.erase(queue.begin() + long(i));
      next.run();
    }
  }

  // The running thread ends here.
  void give_up(const std::string& reason) {
    in_kernel = false;
    if (fault.empty()) fault = reason;
    running->threads[thread.x].gave_up = true;
    wait(State::kDone);
  }

  static void run_threads() {
    Machine& machine = get();
    for (;;) {
      machine.wait(State::kDone);
      in_kernel = true;
      machine.body(machine.arguments);
    }
  }

  // Leaves the thread where its next launch begins.
  void prepare(Block& of, unsigned index) {
    Thread& made = of.threads[index];
    if (made.state == State::kDone && made.stack && !std::exchange(made.gave_up, false)) return;
    if (!made.stack) made.stack.reset(new char[Thread::kStack]);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = made.stack.get();
    context.uc_stack.ss_size = Thread::kStack;
    makecontext(&context, run_threads, 0);
    running = &of;
    thread.x = index;
    if (_setjmp(scheduler) == 0) setcontext(&context);
  }

  void begin(Block& made, unsigned count, size_t shared_bytes) {
    if (made.threads.size() != count) made.threads = std::vector<Thread>(count);
    for (unsigned i = 0; i < count; ++i) prepare(made, i);
    for (unsigned i = 0; i < count; ++i) {
      made.threads[i].state = is_faulty && lacks(&Missing::thread, int(i)) ? State::kMissing : State::kReady;
    }
    made.barriers_of.assign(count, 0), made.shuffles_of.assign(count, 0);
    made.passed.assign(count, {}), made.accesses.clear();
    made.shared = blocks[shuffle() % blocks.size()]->shared;  // as another block has left it
    if (made.shared.size() != shared_bytes || shuffle() % 2) made.shared.assign(shared_bytes, char(0xa5));
    made.order.resize(count);
    std::iota(made.order.begin(), made.order.end(), 0u);
    made.next = count, made.ran = true;
    made.sleeper = -1;
    made.fences = made.tickets = 0;
    made.views.clear();
    for (const Watched& each : watched) made.views.push_back({each.global, each.global});
  }

  // What a block writes into watched memory is the others' from here on, and what they have written before is its own.
  void fence(Block& of) {
    for (size_t w = 0; w < watched.size(); ++w) {
      auto& [at, global] = watched[w];
      for (size_t i = 0; i < global.size(); ++i) {
        if (at[i] != of.views[w].before[i]) global[i] = at[i];
      }
      memcpy(at, global.data(), global.size());
      of.views[w].before = global;
    }
  }

  // Reads past what the running block has of it.
  float read_global(const float* from, float value) const {
    const auto place = reinterpret_cast<const char*>(from);
    for (size_t w = 0; w < watched.size(); ++w) {
      const auto& [at, global] = watched[w];
      if (place < at || place >= at + global.size()) continue;
      const bool written = memcmp(place, &running->views[w].before[size_t(place - at)], sizeof *from) != 0;
      if (!written) memcpy(&value, &global[size_t(place - at)], sizeof value);
    }
    return value;
  }

  // Runs the next thread of the block that is ready; false when all are done.
  bool advance(Block& of) {
    for (;;) {
      for (; of.next < of.order.size(); ++of.next) {
        const unsigned index = of.order[of.next];
        if (of.threads[index].state != State::kReady || int(index) / kWarp == of.sleeper) continue;
        ++of.next;
        of.ran = true;
        thread.x = index;
        resume(of.threads[index]);
        return true;
      }
      if (!of.ran && !release_warps(of)) {
        if (of.sleeper < 0 && !release_block(of)) return false;
        of.sleeper = -1;
      }
      if (of.sleeper < 0 && shuffle() % 2) of.sleeper = shuffle() % 2 ? 0 : int(shuffle() % of.threads.size()) / kWarp;
      std::shuffle(of.order.begin(), of.order.end(), shuffle);
      of.next = 0, of.ran = false;
    }
  }

  void run_grid(unsigned count, unsigned threads) {
    grid.x = count;
    shared = SharedMemory::find();
    std::vector<unsigned> left(count);
    std::iota(left.begin(), left.end(), 0u);
    std::shuffle(left.begin(), left.end(), shuffle);
    for (Watched& each : watched) each.global.assign(each.at, each.at + each.global.size());
    const std::vector<char> before(shared.begin, shared.begin + shared.bytes);  // others have such variables, too
    // From blocks one after another to turns of a few threads, in one launch or another.
    const unsigned longest = shuffle() % 4 == 0 ? unsigned(-1) : threads << shuffle() % 5;
    const size_t room = 1 + shuffle() % kAtOnce;
    for (size_t there = 0; there > 0 || !left.empty();) {
      for (; there < room && !left.empty(); ++there, left.pop_back()) {
        if (there == blocks.size()) blocks.push_back(std::make_unique<Block>());
        blocks[there]->index = left.back();
        begin(*blocks[there], threads, shared.bytes);
      }
      const size_t which = shuffle() % there;
      Block& next = *blocks[which];
      running = &next, block.x = next.index;
      memcpy(shared.begin, next.shared.data(), shared.bytes);
      for (size_t w = 0; w < watched.size(); ++w) {
        memcpy(watched[w].at, next.views[w].now.data(), next.views[w].now.size());
      }
      bool goes_on = true;
      for (unsigned turn = longest == unsigned(-1) ? longest : shuffle() % longest; goes_on && turn > 0; --turn) {
        goes_on = advance(next);
        if (!std::exchange(offers, false)) continue;
        if (shuffle() % 2) --next.next;  // it goes on before others of its block
        if (shuffle() % 2) break;
      }
      if (!goes_on) fence(next);
      memcpy(next.shared.data(), shared.begin, shared.bytes);
      for (size_t w = 0; w < watched.size(); ++w) {
        memcpy(next.views[w].now.data(), watched[w].at, next.views[w].now.size());
      }
      if (!goes_on) std::swap(blocks[which], blocks[--there]);
    }
    for (Watched& each : watched) memcpy(each.at, each.global.data(), each.global.size());
    memcpy(shared.begin, before.data(), shared.bytes);
  }

  // Whether all of these threads are there; one that is missing is wherever the others are.
  template <class Threads>
  static bool all_are(State state, Threads begin, Threads end) {
    for (; begin != end; ++begin) {
      if (begin->state != state && begin->state != State::kMissing) return false;
    }
    return true;
  }

  template <class Threads>
  static void let_go(Threads begin, Threads end) {
    for (; begin != end; ++begin) {
      if (begin->state != State::kMissing) begin->state = State::kReady;
    }
  }

  // Lets warps go on whose threads have all come to their barrier; false if there is none.
  static bool release_warps(Block& of) {
    bool released = false;
    for (size_t warp = 0; warp < of.threads.size(); warp += kWarp) {
      const auto begin = of.threads.begin() + long(warp), end = begin + kWarp;
      if (!all_are(State::kAtWarpBarrier, begin, end)) continue;
      let_go(begin, end);
      released = true;
    }
    return released;
  }

  // Lets a block go on whose threads have all come to its barrier; false when all are done.
  bool release_block(Block& of) {
    const auto begin = of.threads.begin(), end = of.threads.end();
    if (all_are(State::kDone, begin, end)) return false;
    if (!all_are(State::kAtBlockBarrier, begin, end)) {
      stuck = true;  // they wait at a barrier for threads that have gone, or never come
      return false;
    }
    let_go(begin, end);
    return true;
  }
};

// While it is there, the running thread does what the machine does.
struct InMachine {
  InMachine() { Machine::get().in_kernel = false; }
  ~InMachine() { Machine::get().in_kernel = true; }
};

}  // namespace emulation
