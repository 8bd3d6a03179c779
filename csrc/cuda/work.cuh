// The work of a launch, in pieces: chunks, or for passes that need no whole one, units. A unit is a chunk, or an even
// part of it if there are too few chunks to keep a device busy. Thread block b takes the pieces b, b + gridDim.x, ...
// of all tensors, and finds their rows by search in the prefix sums. Grids are as large as there is room, and thread
// blocks stay; or they have a thread block for each piece, and blocks come and go.
#pragma once
#include "memory.cuh"

namespace accumfused::AF_TARGET {

// A call's operands as the device has them, a word for each row: the gradient's address (0: none), and above the bits
// that addresses have its dtype. A fold has as many words in front: the sums' addresses and dtypes.
using Word = uint64_t;
constexpr int kAddressBits = 62;

inline Word word_of(const void* address, Dtype dtype) {
  return address ? reinterpret_cast<Word>(address) | Word(dtype) << kAddressBits : 0;
}
AF_METHOD uintptr_t address_in(Word word) { return word << (64 - kAddressBits) >> (64 - kAddressBits); }
AF_METHOD Dtype dtype_in(Word word) { return Dtype(word >> kAddressBits); }

// One chunk or unit, the same for all threads of a thread block.
struct Piece {
  const Row& row;
  const Operands in;  // without the sum
  int64_t index;      // of the row
  int64_t offset;
  int n;

  __device__ int in_chunk() const { return int(offset % kChunk); }  // where in its chunk it begins
};

struct Work {
  const Row* rows;
  Word* words;              // in memory; a launch's packet may have newer ones
  int first_row, count;     // of the rows that it is about
  int first_piece, pieces;  // of theirs
  int size;                 // of a piece, in elements
  uint32_t* ticket;         // 0 between launches
  float* counts;            // each row's steps before the next one: see packet.cuh
};

// The row is the last one whose first piece is not behind; rows without elements have none. A warp looks at 32 rows at
// once, because each look waits for memory. words(i): the i-th of the call's.
template <class Words>
__device__ Piece piece_of(const Work& work, int piece, const Words& words) {
  const auto first = work.size == int(kChunk) ? &Row::first_chunk : &Row::first_unit;
  const int lane = int(threadIdx.x) % kWarp;
  int low = work.first_row, left = work.count;
  while (left > 1) {
    const int stride = (left + kWarp - 1) / kWarp, look = lane * stride;
    const bool is_begun = look < left && work.rows[low + look].*first <= piece;  // the first one always is
    const int skipped = (__popc(__ballot_sync(0xffffffffu, is_begun)) - 1) * stride;
    low += skipped, left = left - skipped < stride ? left - skipped : stride;
  }
  const Row& row = work.rows[low];
  const int64_t offset = int64_t(piece - row.*first) * work.size, rest = row.numel - offset;
  const Word grad = words(low);
  const Operands in = {reinterpret_cast<const void*>(address_in(grad)), nullptr, dtype_in(grad)};
  return {row, in, low, offset, int(rest < work.size ? rest : work.size)};
}
__device__ inline Piece piece_of(const Work& work, int piece) {
  return piece_of(work, piece, [&](int i) { return work.words[i]; });
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
