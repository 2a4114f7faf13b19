/*
 * language.h - the language of CUDA C on the CPU, for g++: qualifiers, built-in variables, barriers, warps, atomics and
 * fences. The translator of opjit.emulate rewrites launches and __shared__. The rest is ordinary C++.
 *
 * Each thread of a grid is a fiber (see fiber.cc). The waiting functions are in launch.cc. If code is compiled with
 * OPJIT_EMULATE_CHECKED, check.cc receives each access to memory.
 */
#ifndef OPJIT_EMULATE_LANGUAGE_H
#define OPJIT_EMULATE_LANGUAGE_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "vectors.h"

#ifndef OPJIT_EMULATE_EXTENSION /* torch's headers must not see it */
#define __CUDACC__ 1
#endif
#define OPJIT_EMULATED 1

#define __host__
#define __device__
#define __global__
#ifdef OPJIT_EMULATE_CHECKED
#define EMU_INLINED __attribute__((always_inline))
#else
#define EMU_INLINED
#endif
#define EMU_TEXT(name_) #name_
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...) _Pragma("GCC error \"__cluster_dims__\"")

/* Functions of the emulation: the checks ignore their accesses to memory. */
#define EMU_OWN __attribute__((no_sanitize_thread, no_sanitize_undefined, no_sanitize_coverage, unused)) inline

/* ---------------------------------------------------------------------------------------------- */
/* Built-in variables                                                                             */

/*
 * The runtime exchanges them when the fiber changes. They are constant for a kernel, so the compiler keeps them in
 * registers. They are variables instead of macros because a host function may declare a `dim3 blockDim`.
 */
#ifndef EMU_CONST
#define EMU_CONST const /* for all but the runtime, which sets them */
#endif
#define EMU_BUILTIN extern EMU_CONST __thread __attribute__((tls_model("initial-exec")))
EMU_BUILTIN uint3 threadIdx, blockIdx, blockDim, gridDim;
EMU_BUILTIN int emu_lane; /* of the warp */
static const int warpSize = 32;

/* ---------------------------------------------------------------------------------------------- */
/* Calls of the translated source                                                               */

/* A place in the author's source. As a default argument, `EMU_HERE` is the caller's. */
struct emu_place {
    const char *file;
    int line;
};
#define EMU_HERE emu_here()
EMU_OWN static constexpr emu_place emu_here(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    return {file, line};
}

/* A variable in shared memory: each block has one. */
struct emu_variable {
    const char *name;
    emu_place at;
    size_t size, align;
};

void *emu_shared(const emu_variable *variable);
void *emu_dynamic_shared(const char *name, size_t align);

/* The type of an operand of inline PTX. */
#define EMU_VALUE(operand_) std::remove_reference_t<decltype(operand_)>

/* Whether the caller is a thread of a grid. Otherwise it is a host function, which launches a kernel. */
bool emu_is_thread(void);

/* A kernel that a host function launches: `call` runs one thread, with copies of the arguments. */
struct emu_kernel {
    const char *name;
    int max_threads; /* of __launch_bounds__, or 0 */
    void (*call)(void **arguments);
};

/* The part between <<< and >>>, for the launch that follows in the same host thread. */
struct emu_configuration {
    dim3 grid, block;
    size_t shared;
    bool cooperative;
    emu_place at;
    dim3 cluster; /* blocks that run together, of which the grid is a multiple */
};

typedef struct CUstream_st *cudaStream_t;

void emu_configure(const emu_configuration &configuration);
void emu_launched(void); /* adds a finding if no kernel has used the configuration */
void emu_launch(const emu_kernel &kernel, void **arguments);

/* The same for a C++ extension, whose tensors opjit does not know. Throws std::runtime_error with the first finding. */
void emu_launch_of_extension(const emu_kernel &kernel, void **arguments);

void emu_know_kernel(const void *function, void (*call)(void **arguments)); /* for launches by address */

EMU_OWN static void emu_configured(emu_place at, dim3 grid, dim3 block, size_t shared = 0, cudaStream_t = nullptr)
{
    emu_configure({grid, block, shared, false, at, dim3()});
}

/*
 * An argument of a thread. As on a GPU, its bytes are copied without a constructor or destructor. The ABI passes an object
 * with a constructor or destructor by address, and other objects by value.
 */
template <typename type,
          bool plain = std::is_trivially_copy_constructible<type>::value && std::is_trivially_destructible<type>::value>
struct emu_argument {
    typedef type passed;
    type *from;
    EMU_OWN emu_argument(void *from) : from((type *)from) {}
    EMU_OWN passed pass() { return *from; }
};

template <typename type>
struct emu_argument<type, false> {
    typedef void *passed;
    alignas(type) unsigned char bytes[sizeof(type)];
    EMU_OWN emu_argument(void *from) { memcpy(bytes, from, sizeof bytes); }
    EMU_OWN passed pass() { return bytes; }
};

/* A kernel's calls by its type. */
template <typename type, type *kernel>
struct emu_callable;

template <typename... types, void (*kernel)(types...)>
struct emu_callable<void(types...), kernel> {
    template <size_t... index>
    EMU_OWN static void run(void **arguments, std::index_sequence<index...>)
    {
        typedef void (*passing)(typename emu_argument<types>::passed...);
        (void)arguments;
        ((passing)kernel)(emu_argument<types>(arguments[index]).pass()...);
    }
    EMU_OWN static void call(void **arguments) { run(arguments, std::index_sequence_for<types...>()); }
    EMU_OWN static bool know()
    {
        emu_know_kernel((const void *)kernel, call);
        return true;
    }
    static inline const bool known = know(); /* when the library is opened */
};

/* An array of dynamic shared memory. Outside of functions, it stands for the array of the block that uses it. */
template <typename array>
struct emu_dynamic {
    const char *name;
    size_t alignment;
    typedef std::remove_extent_t<array> element;
    EMU_OWN element *begin() const { return (element *)emu_dynamic_shared(name, alignment); }
    EMU_OWN operator element *() const { return begin(); }
    template <typename index>
    EMU_OWN element &operator[](index i) const
    {
        return begin()[i];
    }
};

/* Each kernel begins with this call if a host function calls the kernel. */
template <auto *kernel>
EMU_OWN void emu_launch_as(const char *name, int max_threads, void **arguments)
{
    typedef emu_callable<std::remove_pointer_t<decltype(kernel)>, kernel> callable;
    (void)callable::known;
#ifdef OPJIT_EMULATE_EXTENSION
    emu_launch_of_extension({name, max_threads, callable::call}, arguments);
#else
    emu_launch({name, max_threads, callable::call}, arguments);
#endif
}

/* ---------------------------------------------------------------------------------------------- */
/* Barriers and fences                                                                            */

enum emu_vote { EMU_NO_VOTE, EMU_COUNT, EMU_AND, EMU_OR };

int emu_block_barrier(emu_vote vote, int value, emu_place at);
void emu_grid_barrier(emu_place at);
void emu_warp_barrier(unsigned mask, emu_place at);
enum emu_scope { EMU_BLOCK, EMU_DEVICE, EMU_SYSTEM };

void emu_fence(emu_scope scope);
void emu_pause(void); /* other threads may go on */

EMU_OWN static void __syncthreads(emu_place at = EMU_HERE)
{
    emu_block_barrier(EMU_NO_VOTE, 0, at);
}

EMU_OWN static int __syncthreads_count(int value, emu_place at = EMU_HERE)
{
    return emu_block_barrier(EMU_COUNT, value != 0, at);
}

EMU_OWN static int __syncthreads_and(int value, emu_place at = EMU_HERE)
{
    return emu_block_barrier(EMU_AND, value != 0, at);
}

EMU_OWN static int __syncthreads_or(int value, emu_place at = EMU_HERE)
{
    return emu_block_barrier(EMU_OR, value != 0, at);
}

EMU_OWN static void __syncwarp(unsigned mask = 0xffffffffu, emu_place at = EMU_HERE)
{
    emu_warp_barrier(mask, at);
}

EMU_OWN static void __threadfence_block(void)
{
    emu_fence(EMU_BLOCK);
}

EMU_OWN static void __threadfence(void)
{
    emu_fence(EMU_DEVICE);
}

EMU_OWN static void __threadfence_system(void)
{
    emu_fence(EMU_SYSTEM);
}

EMU_OWN static void __nanosleep(unsigned)
{
    emu_pause();
}

/* ---------------------------------------------------------------------------------------------- */
/* Warps                                                                                          */

/* The values that the lanes of a warp hand over at one place, and which lanes came. */
struct emu_lane_values {
    unsigned came;
    unsigned char value[32][24];
};

void emu_exchange(const char *what, unsigned mask, const void *value, size_t size, emu_lane_values *values,
                  emu_place at);
void emu_bad_lane(const char *what, int lane, emu_place at);

template <typename value>
EMU_OWN value emu_value_of(const emu_lane_values &values, int lane)
{
    value found;
    memcpy((void *)&found, values.value[lane], sizeof found);
    return found;
}

template <typename value>
EMU_OWN value emu_shuffle(const char *what, unsigned mask, value own, int from, emu_place at)
{
    static_assert(sizeof(value) <= 16, "a shuffle moves at most 16 bytes");
    emu_lane_values values;
    emu_exchange(what, mask, &own, sizeof own, &values, at);
    if (!(values.came >> from & 1))
        emu_bad_lane(what, from, at);
    return emu_value_of<value>(values, from);
}

template <typename value>
EMU_OWN value __shfl_sync(unsigned mask, value own, int source, int width = 32, emu_place at = EMU_HERE)
{
    const int first = emu_lane & ~(width - 1);
    return emu_shuffle("__shfl_sync", mask, own, first | (source & (width - 1)), at);
}

template <typename value>
EMU_OWN value __shfl_xor_sync(unsigned mask, value own, int with, int width = 32, emu_place at = EMU_HERE)
{
    const int other = emu_lane ^ with, last = emu_lane | (width - 1);
    return emu_shuffle("__shfl_xor_sync", mask, own, other > last ? emu_lane : other, at);
}

template <typename value>
EMU_OWN value __shfl_down_sync(unsigned mask, value own, unsigned by, int width = 32, emu_place at = EMU_HERE)
{
    const int in_group = emu_lane & (width - 1);
    const bool inside = in_group + (int)by < width;
    return emu_shuffle("__shfl_down_sync", mask, own, inside ? emu_lane + (int)by : emu_lane, at);
}

template <typename value>
EMU_OWN value __shfl_up_sync(unsigned mask, value own, unsigned by, int width = 32, emu_place at = EMU_HERE)
{
    const bool inside = (emu_lane & (width - 1)) >= (int)by;
    return emu_shuffle("__shfl_up_sync", mask, own, inside ? emu_lane - (int)by : emu_lane, at);
}

EMU_OWN static unsigned emu_ballot(const char *what, unsigned mask, bool own, emu_place at)
{
    emu_lane_values values;
    emu_exchange(what, mask, &own, sizeof own, &values, at);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++)
        if (values.came >> lane & 1)
            votes |= (unsigned)emu_value_of<bool>(values, lane) << lane;
    return votes;
}

EMU_OWN static unsigned __ballot_sync(unsigned mask, int own, emu_place at = EMU_HERE)
{
    return emu_ballot("__ballot_sync", mask, own != 0, at);
}

EMU_OWN static int __any_sync(unsigned mask, int own, emu_place at = EMU_HERE)
{
    return emu_ballot("__any_sync", mask, own != 0, at) != 0;
}

EMU_OWN static int __all_sync(unsigned mask, int own, emu_place at = EMU_HERE)
{
    return emu_ballot("__all_sync", mask, own == 0, at) == 0;
}

template <typename value>
EMU_OWN unsigned __match_any_sync(unsigned mask, value own, emu_place at = EMU_HERE)
{
    emu_lane_values values;
    emu_exchange("__match_any_sync", mask, &own, sizeof own, &values, at);
    unsigned equal = 0;
    for (int lane = 0; lane < 32; lane++)
        if (values.came >> lane & 1 && memcmp(&own, values.value[lane], sizeof own) == 0)
            equal |= 1u << lane;
    return equal;
}

template <typename value>
EMU_OWN unsigned __match_all_sync(unsigned mask, value own, int *all, emu_place at = EMU_HERE)
{
    const unsigned equal = __match_any_sync(mask, own, at);
    *all = equal == mask;
    return *all ? mask : 0;
}

template <typename value, typename function>
EMU_OWN value emu_warp_reduce(const char *what, unsigned mask, value own, function combine, emu_place at)
{
    emu_lane_values values;
    emu_exchange(what, mask, &own, sizeof own, &values, at);
    int lane = __builtin_ctz(values.came);
    value result = emu_value_of<value>(values, lane);
    while (++lane < 32)
        if (values.came >> lane & 1)
            result = combine(result, emu_value_of<value>(values, lane));
    return result;
}

#define EMU_REDUCE(name_, expression_) \
    template <typename value> \
    EMU_OWN value __reduce_##name_##_sync(unsigned mask, value own, emu_place at = EMU_HERE) \
    { \
        auto combine = [](value a, value b) -> value { return expression_; }; \
        return emu_warp_reduce("__reduce_" #name_ "_sync", mask, own, combine, at); \
    }
EMU_REDUCE(add, a + b)
EMU_REDUCE(min, a < b ? a : b)
EMU_REDUCE(max, a > b ? a : b)
EMU_REDUCE(and, a &b)
EMU_REDUCE(or, a | b)
EMU_REDUCE(xor, a ^ b)

/* CUDA does not promise that lanes run together, so an answer with one lane is allowed. */
EMU_OWN static unsigned __activemask(void)
{
    return 1u << emu_lane;
}

/* ---------------------------------------------------------------------------------------------- */
/* Atomics are relaxed, as in CUDA                                                                   */

/* An exchange loads, but does not depend on the old value. */
enum emu_access { EMU_LOADS = 1, EMU_STORES = 2, EMU_UPDATES = 3, EMU_EXCHANGES = 7 };

/* The threads for which an access is atomic, and whether it also orders the accesses around it. */
struct emu_order {
    emu_scope scope;
    bool acquires, releases;
};

static constexpr bool emu_contains(const char *text, const char *part)
{
    for (; *text; text++)
        for (int i = 0;; i++) {
            if (!part[i])
                return true;
            if (text[i] != part[i])
                break;
        }
    return false;
}

/* The scope of a PTX instruction. A volatile access is a relaxed one of system scope. */
static constexpr emu_scope emu_scope_of(const char *ptx)
{
    if (emu_contains(ptx, ".sys") || emu_contains(ptx, ".volatile"))
        return EMU_SYSTEM;
    return emu_contains(ptx, ".cta") ? EMU_BLOCK : EMU_DEVICE;
}

static constexpr emu_order emu_order_of(const char *ptx)
{
    const bool both = emu_contains(ptx, ".acq_rel");
    return {emu_scope_of(ptx), both || emu_contains(ptx, ".acquire"), both || emu_contains(ptx, ".release")};
}

/* Called before the access, from functions that are not inlined: their return address is the author's line. */
void emu_atomic(const void *place, int size, emu_access access, emu_order order, const void *caller);
void emu_progress(void); /* a value has changed for which another block may wait */
#define EMU_ATOMIC __attribute__((noinline, no_sanitize_thread, no_sanitize_undefined, no_sanitize_coverage, unused))
#define EMU_SEES(place_, access_, order_) \
    emu_atomic((const void *)(place_), sizeof *(place_), access_, order_, __builtin_return_address(0))
#define EMU_RELAXED(scope_) (emu_order{scope_, false, false})

template <size_t size>
struct emu_word;
template <>
struct emu_word<2> {
    typedef uint16_t type;
};
template <>
struct emu_word<4> {
    typedef uint32_t type;
};
template <>
struct emu_word<8> {
    typedef uint64_t type;
};
template <>
struct emu_word<16> {
    typedef unsigned __int128 type;
};

/* A parameter that decides no template argument: atomicAdd(&floats, 1) is allowed. */
template <typename value>
struct emu_same {
    typedef value type;
};
template <typename value>
using emu_as = typename emu_same<value>::type;

/*
 * All threads of a grid share one thread of the machine, so an update is one step as long as nothing between its load
 * and its store lets the scheduler run another thread. Code that the compiler instruments does (a loop's budget ends in
 * it), and a lambda is instrumented even within a function that is not. So the new value is an expression.
 */
template <typename value>
EMU_OWN value emu_old(const value *place)
{
    value old;
    memcpy((void *)&old, (const void *)place, sizeof old);
    return old;
}

template <typename value>
EMU_OWN void emu_set(value *place, value updated)
{
    typedef typename emu_word<sizeof(value)>::type word;
    word before, after;
    memcpy(&before, (const void *)place, sizeof before);
    memcpy(&after, (const void *)&updated, sizeof after);
    if (after != before)
        emu_progress();
    __atomic_store_n((word *)place, after, __ATOMIC_RELAXED);
}

#define EMU_ATOMIC_OF_SCOPE(name_, scope_, access_, expression_) \
    template <typename value> \
    EMU_ATOMIC value name_(value *place, emu_as<value> by) \
    { \
        EMU_SEES(place, access_, EMU_RELAXED(scope_)); \
        const value old = emu_old(place); \
        emu_set<value>(place, expression_); \
        return old; \
    }
#define EMU_ATOMIC_UPDATE(name_, access_, expression_) \
    EMU_ATOMIC_OF_SCOPE(name_, EMU_DEVICE, access_, expression_) \
    EMU_ATOMIC_OF_SCOPE(name_##_block, EMU_BLOCK, access_, expression_) \
    EMU_ATOMIC_OF_SCOPE(name_##_system, EMU_SYSTEM, access_, expression_)
EMU_ATOMIC_UPDATE(atomicAdd, EMU_UPDATES, old + by)
EMU_ATOMIC_UPDATE(atomicSub, EMU_UPDATES, old - by)
EMU_ATOMIC_UPDATE(atomicMin, EMU_UPDATES, by < old ? by : old)
EMU_ATOMIC_UPDATE(atomicMax, EMU_UPDATES, by > old ? by : old)
EMU_ATOMIC_UPDATE(atomicAnd, EMU_UPDATES, old &by)
EMU_ATOMIC_UPDATE(atomicOr, EMU_UPDATES, old | by)
EMU_ATOMIC_UPDATE(atomicXor, EMU_UPDATES, old ^ by)
EMU_ATOMIC_UPDATE(atomicInc, EMU_UPDATES, old >= by ? 0 : old + 1)
EMU_ATOMIC_UPDATE(atomicDec, EMU_UPDATES, old == 0 || old > by ? by : old - 1)
EMU_ATOMIC_UPDATE(atomicExch, EMU_EXCHANGES, by)

#define EMU_ATOMIC_CAS(name_, scope_) \
    template <typename value> \
    EMU_ATOMIC value name_(value *place, emu_as<value> expected, emu_as<value> by) \
    { \
        EMU_SEES(place, EMU_UPDATES, EMU_RELAXED(scope_)); \
        const value old = emu_old(place); \
        emu_set<value>(place, old == expected ? by : old); \
        return old; \
    }
EMU_ATOMIC_CAS(atomicCAS, EMU_DEVICE)
EMU_ATOMIC_CAS(atomicCAS_block, EMU_BLOCK)
EMU_ATOMIC_CAS(atomicCAS_system, EMU_SYSTEM)

/* ---------------------------------------------------------------------------------------------- */
/* PTX's ld, st, atom and red with an order and a scope                                           */

template <typename value>
EMU_ATOMIC value emu_ptx_load(const value *place, emu_order order)
{
    EMU_SEES(place, EMU_LOADS, order);
    return *(const volatile value *)place;
}

template <typename value>
EMU_ATOMIC void emu_ptx_store(value *place, emu_as<value> stored, emu_order order)
{
    EMU_SEES(place, EMU_STORES, order);
    *(volatile value *)place = stored;
}

/* Returns the old value. */
template <typename value>
EMU_ATOMIC value emu_ptx_add(value *place, emu_as<value> by, emu_order order)
{
    EMU_SEES(place, EMU_UPDATES, order);
    const value old = emu_old(place);
    emu_set<value>(place, old + by);
    return old;
}

/* ld.relaxed.sys and st.relaxed.sys of 16 bytes at once. */
EMU_ATOMIC static void emu_load_words(const void *place, uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d)
{
    uint32_t words[4];
    emu_atomic(place, sizeof words, EMU_LOADS, EMU_RELAXED(EMU_SYSTEM), __builtin_return_address(0));
    memcpy(words, place, sizeof words);
    a = words[0];
    b = words[1];
    c = words[2];
    d = words[3];
}

EMU_ATOMIC static void emu_store_words(void *place, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t words[4] = {a, b, c, d};
    emu_atomic(place, sizeof words, EMU_STORES, EMU_RELAXED(EMU_SYSTEM), __builtin_return_address(0));
    memcpy(place, words, sizeof words);
}

/* ---------------------------------------------------------------------------------------------- */
/* Loads and stores with a hint for the caches                                                    */

#define EMU_PLAIN \
    template <typename value> \
    __attribute__((always_inline)) static inline
#define EMU_LOAD(name_) \
    EMU_PLAIN value name_(const value *place) \
    { \
        return *place; \
    }
#define EMU_STORE(name_) \
    EMU_PLAIN void name_(value *place, emu_as<value> stored) \
    { \
        *place = stored; \
    }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwb)
EMU_STORE(__stwt)

/* ---------------------------------------------------------------------------------------------- */
/* The end of a kernel                                                                            */

[[noreturn]] void emu_assertion(const char *text, emu_place at);
[[noreturn]] void emu_trap(emu_place at);
long long emu_ticks(void);
unsigned long long emu_nanoseconds(void);
bool emu_is_shared(const void *place);

EMU_OWN static void __trap(emu_place at = EMU_HERE)
{
    emu_trap(at);
}

EMU_OWN static long long clock64(void)
{
    return emu_ticks();
}

EMU_OWN static bool __isShared(const void *place)
{
    return emu_is_shared(place);
}

EMU_OWN static bool __isGlobal(const void *place)
{
    return !emu_is_shared(place);
}

#endif
