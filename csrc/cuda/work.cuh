// The work of a launch. A persistent grid: thread block b takes the chunks b, b + gridDim.x, ... of all tensors, and
// finds their rows by search in the prefix sums.
#pragma once
#include "memory.cuh"

namespace accumfused::AF_TARGET {

// One chunk, the same for all threads of a thread block.
struct Chunk {
  const Row& row;
  const Operands& in;
  int64_t index;  // of the row
  int64_t offset;
  int n;
};

struct Work {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int chunks;        // over all rows; 2^31 of them would be 2^46 elements
  uint32_t* ticket;  // 0 between launches
};

__device__ inline Chunk chunk_of(const Work& work, int chunk) {
  const int64_t index = row_of(work.rows, work.count, chunk);
  const Row& row = work.rows[index];
  const int64_t offset = (chunk - row.first_chunk) * kChunk, left = row.numel - offset;
  return {row, work.operands[index], index, offset, int(left < kChunk ? left : kChunk)};
}

// Tells the compiler that a pointer, which was read from memory, is one to global memory: else accesses are generic.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A stream of a chunk, from its first element on.
template <class T, class Void>
__device__ T* stream_at(Void* base, const Chunk& at) {
  return global(static_cast<T*>(base) + at.offset);
}

// Calls body(grad + offset, whether vector accesses may be used) with the gradient's type.
template <class Body>
__device__ void with_grad(const Operands& in, int64_t offset, const Body& body) {
  if (in.grad_dtype == Dtype::kFloat32) {
    body(global(static_cast<const float*>(in.grad) + offset), is_aligned(in.grad, 4));
  } else if (in.grad_dtype == Dtype::kFloat16) {
    body(global(static_cast<const Float16*>(in.grad) + offset), is_aligned(in.grad, 2));
  } else {
    body(global(static_cast<const Bfloat16*>(in.grad) + offset), is_aligned(in.grad, 2));
  }
}

}  // namespace accumfused::AF_TARGET
