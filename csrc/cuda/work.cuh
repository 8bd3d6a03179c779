// The work of a launch, in pieces: chunks, or for passes that need no whole one, units. A unit is a chunk, or an even
// part of it if there are too few chunks to keep a device busy. Thread block b takes the pieces b, b + gridDim.x, ...
// of all tensors, and finds their rows by search in the prefix sums. Grids are as large as there is room, and thread
// blocks stay; or they have a thread block for each piece, and blocks come and go.
#pragma once
#include "memory.cuh"

namespace accumfused::AF_TARGET {

// One chunk or unit, the same for all threads of a thread block.
struct Piece {
  const Row& row;
  const Operands& in;
  int64_t index;  // of the row
  int64_t offset;
  int n;

  __device__ int in_chunk() const { return int(offset % kChunk); }  // where in its chunk it begins
};

struct Work {
  const Row* rows;
  const Operands* operands;
  int count;         // of rows
  int pieces;        // over all rows
  int size;          // of a piece, in elements
  uint32_t* ticket;  // 0 between launches
  float* counts;     // each row's steps before the next one: see counts.cuh
};

// The row is the last one whose first piece is not behind; rows without elements have none. A warp looks at 32 rows at
// once, because each look waits for memory.
__device__ inline Piece piece_of(const Work& work, int piece) {
  const auto first = work.size == int(kChunk) ? &Row::first_chunk : &Row::first_unit;
  const int lane = int(threadIdx.x) % kWarp;
  int low = 0, left = work.count;
  while (left > 1) {
    const int stride = (left + kWarp - 1) / kWarp, look = lane * stride;
    const bool is_begun = look < left && work.rows[low + look].*first <= piece;  // the first one always is
    const int skipped = (__popc(__ballot_sync(0xffffffffu, is_begun)) - 1) * stride;
    low += skipped, left = left - skipped < stride ? left - skipped : stride;
  }
  const Row& row = work.rows[low];
  const int64_t offset = int64_t(piece - row.*first) * work.size, rest = row.numel - offset;
  return {row, work.operands[low], low, offset, int(rest < work.size ? rest : work.size)};
}

// Tells the compiler that a pointer, which was read from memory, is one to global memory: else accesses are generic.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A stream of a chunk, from its first element on.
template <class T, class Void>
__device__ T* stream_at(Void* base, const Piece& at) {
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
