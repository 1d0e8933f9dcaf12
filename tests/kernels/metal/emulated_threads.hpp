// Threads of a Metal threadgroup as fibres, for a kernel that is compiled as C++.
//
// A simdgroup's lanes run one after another up to the next simd_sum or threadgroup_barrier. `reversed` runs threads in
// the other order, so a result that depends on the order shows. Errors, none of which a device reports:
//   a thread reads or writes outside of a buffer, or two threads write the same number of an output
//   a thread reads threadgroup memory that nobody has written, or that another one writes before the next barrier
//   lanes of a simdgroup are not all at the same simd_sum, or threads not all at the same barrier
//   threadgroup memory exceeds 32 KiB
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef unsigned int uint;
typedef _Float16 float16_t;

struct uint3 {
    uint x, y, z;
};

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float number) {
        uint32_t all;
        memcpy(&all, &number, 4);
        bits = number != number ? 0x7fc0 : (all + 0x7fff + ((all >> 16) & 1)) >> 16;  // to nearest, ties to even
    }
    operator float() const {
        const uint32_t all = uint32_t(bits) << 16;
        float number;
        memcpy(&number, &all, 4);
        return number;
    }
};

static const int LANES_ = 32, MOST_THREADS = 1024, MOST_MEMORIES = 8, STACK_BYTES = 1 << 16;
enum State { RUNNING, AT_SUM, AT_BARRIER, ENDED };

static char error_[256];
static int threads_, now_, epoch_, group_number_;
static State state_[MOST_THREADS];
static int line_[MOST_THREADS];
static float given_[MOST_THREADS], sum_[MOST_THREADS / LANES_];
static jmp_buf scheduler_, at_[MOST_THREADS];
static bool begun_[MOST_THREADS];
static ucontext_t contexts_[MOST_THREADS], unused_;
static char* stacks_;

[[noreturn]] static void to_scheduler() { _longjmp(scheduler_, 1); }

[[noreturn]] static void fail(const char* text, long a = 0, long b = 0) {
    snprintf(error_, sizeof error_, text, a, b);
    to_scheduler();
}

static void wait_(State state, int line) {
    state_[now_] = state;
    line_[now_] = line;
    if (!_setjmp(at_[now_]))
        to_scheduler();
}

static float simd_sum_(float number, int line) {
    given_[now_] = number;
    wait_(AT_SUM, line);
    return sum_[now_ / LANES_];
}

#define simd_sum(number) simd_sum_(number, __LINE__)
#define threadgroup_barrier(flags) wait_(AT_BARRIER, __LINE__)
namespace mem_flags {
enum { mem_threadgroup };
}
namespace metal {
inline int min(int a, int b) { return b < a ? b : a; }
inline float max(float a, float b) { return a < b ? b : a; }
namespace fast {
inline float exp(float x) { return expf(x); }
}
namespace precise {
inline float tanh(float x) { return tanhf(x); }
}
}

// Pointer to a buffer, whose accesses are checked.
template <typename T> struct Numbers {
    T* base;
    long size, at;
    int* writes;  // of an output's numbers
    template <typename I> Numbers operator+(I by) const { return {base, size, at + long(by), writes}; }
    struct Number {
        T* here;
        int* writes;
        operator T() const { return *here; }
        template <typename U> explicit operator U() const { return static_cast<U>(*here); }
        void operator=(T number) {
            if (++*writes > 1)
                fail("a number of an output is written twice");
            *here = number;
        }
    };
    template <typename I> Number operator[](I index) const {
        const long i = at + long(index);
        if (i < 0 || i >= size)
            fail("number %ld of a buffer of %ld", i, size);
        return {base + i, writes + i};
    }
};
template <typename T> struct Numbers<const T> {
    const T* base;
    long size, at;
    int* reads;
    template <typename I> Numbers operator+(I by) const { return {base, size, at + long(by), reads}; }
    template <typename I> T operator[](I index) const {
        const long i = at + long(index);
        if (i < 0 || i >= size)
            fail("number %ld of a buffer of %ld", i, size);
        ++reads[i];
        return base[i];
    }
};

// Memory of a threadgroup. `id`: its place among the declarations.
struct Cell {
    float number;
    int group, write_epoch, writer, read_epoch, reader;
};
static Cell* memories_[MOST_MEMORIES];
static long sizes_[MOST_MEMORIES];
struct Memory {
    int id;
    Memory(int id, long size) : id(id) {
        if (!memories_[id]) {
            memories_[id] = (Cell*)calloc(size, sizeof(Cell));
            sizes_[id] = size;
            long bytes = 0;
            for (long s : sizes_)
                bytes += 4 * s;
            if (bytes > 32 << 10)
                fail("%ld bytes of threadgroup memory", bytes);
        }
    }
    struct Number {
        Cell* cell;
        operator float() const {
            if (cell->group != group_number_)
                fail("threadgroup memory is read before it is written");
            if (cell->write_epoch == epoch_ && cell->writer != now_)
                fail("thread %ld reads what thread %ld writes, without a barrier", now_, cell->writer);
            const int same = cell->read_epoch == epoch_ && cell->reader != now_ ? -1 : now_;
            cell->read_epoch = epoch_, cell->reader = same;
            return cell->number;
        }
        void operator=(float number) {
            if (cell->group == group_number_ && cell->write_epoch == epoch_ && cell->writer != now_)
                fail("threads %ld and %ld write the same memory", now_, cell->writer);
            if (cell->read_epoch == epoch_ && cell->reader != now_)
                fail("thread %ld writes what others read, without a barrier", now_);
            cell->number = number;
            cell->group = group_number_, cell->write_epoch = epoch_, cell->writer = now_;
        }
    };
    Number operator[](long index) const {
        if (index < 0 || index >= sizes_[id])
            fail("number %ld of threadgroup memory of %ld", index, sizes_[id]);
        return {memories_[id] + index};
    }
};

static void call_kernel();  // with the thread's own position

static void fibre() {
    for (;;) {
        call_kernel();
        wait_(ENDED, 0);
    }
}

static void resume(int thread) {
    if (_setjmp(scheduler_))
        return;
    now_ = thread;
    state_[thread] = RUNNING;
    if (begun_[thread])
        _longjmp(at_[thread], 1);
    begun_[thread] = true;
    ucontext_t& context = contexts_[thread];
    getcontext(&context);
    context.uc_stack.ss_sp = stacks_ + size_t(thread) * STACK_BYTES;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, fibre, 0);
    swapcontext(&unused_, &context);
}

// Runs a simdgroup until each of its threads is at a barrier or at its end.
static void run_simdgroup(int first, int end, bool reversed) {
    for (bool again = true; again;) {
        again = false;
        for (int i = first; i < end; ++i) {
            const int thread = reversed ? first + end - 1 - i : i;
            if (state_[thread] == RUNNING)
                resume(thread);
            if (*error_)
                return;
        }
        int sums = 0;
        for (int i = first; i < end; ++i)
            sums += state_[i] == AT_SUM && line_[i] == line_[first];
        if (!sums)
            return;
        if (sums != end - first || sums != LANES_) {
            snprintf(error_, sizeof error_, "%d lanes are at a simd_sum", sums);
            return;
        }
        float tree[LANES_];
        memcpy(tree, given_ + first, sizeof tree);
        for (int half = LANES_ / 2; half; half /= 2)
            for (int i = 0; i < half; ++i)
                tree[i] += tree[i + half];
        sum_[first / LANES_] = tree[0];
        for (int i = first; i < end; ++i)
            state_[i] = RUNNING;
        again = true;
    }
}

static void run_threadgroup(bool reversed) {
    ++group_number_;
    ++epoch_;
    for (int i = 0; i < threads_; ++i)
        state_[i] = RUNNING;
    const int simdgroups = (threads_ + LANES_ - 1) / LANES_;
    for (;;) {
        for (int i = 0; i < simdgroups; ++i) {
            const int simd = reversed ? simdgroups - 1 - i : i;
            const int end = (simd + 1) * LANES_;
            run_simdgroup(simd * LANES_, end < threads_ ? end : threads_, reversed);
            if (*error_)
                return;
        }
        int waiting = 0;
        for (int i = 0; i < threads_; ++i)
            waiting += state_[i] == AT_BARRIER && line_[i] == line_[0];
        for (int i = 0; i < threads_; ++i)
            if (waiting ? waiting != threads_ : state_[i] != ENDED) {
                snprintf(error_, sizeof error_, "%d of %d threads are at a barrier", waiting, threads_);
                return;
            }
        if (!waiting)
            return;
        ++epoch_;
        for (int i = 0; i < threads_; ++i)
            state_[i] = RUNNING;
    }
}
