/*
 * opjit_messages.h - words and tiles: the fastest ways for a kernel to send data to other ranks, for collectives.
 */
#ifndef OPJIT_MESSAGES_H
#define OPJIT_MESSAGES_H

#include "opjit_peers.h"

#ifdef __CUDACC__
/*
 * All collectives of a group share its inboxes, in which each block has slots for the data from each rank. The slots
 * are used in turn. A rank writes to a slot again only when later messages of the reader show that it was read, so a
 * call doesn't end with a barrier. The inbox of each rank contains
 *
 *     words   [2 turns][from rank][block][OPJIT_WORDS_OF_BLOCK]    16 bytes each: 12 of data, and the count
 *     tiles   [2 rings][from rank][block][4 turns]                 opjit_tile_bytes() each
 */
enum { OPJIT_BLOCKS = 256, OPJIT_WORDS_OF_BLOCK = 1024, OPJIT_TURNS = 4 };

/* A signal takes longer than the data of a small tile, so tiles are as large as the inboxes of a group allow: 128 MiB. */
OPJIT_HOST_DEVICE int opjit_tile_bytes(int world)
{
    return world <= 2 ? 32 * 1024 : world <= 4 ? 16 * 1024 : 8 * 1024;
}

/*
 * Words are the fastest way to send few bytes. The 16 bytes of a word are stored and loaded in one step, and contain
 * the count that proves its arrival. Therefore a word needs neither a fence nor a signal.
 *
 *     const uint32_t count = opjit_begin_words(&p);
 *     opjit_push(&p, to, count, i, data);                // to each rank: at most OPJIT_WORDS_OF_BLOCK words of a block
 *     came &= opjit_pull(&p, from, count, i, data);      // from each rank
 *     opjit_end_words(&p, count, came);
 */
typedef struct opjit_word {
    uint32_t data[3];
} opjit_word;

OPJIT_PEER_FUNCTION uint32_t *opjit_word_at(const opjit_peers *p, int at, int from, uint32_t count, int i)
{
    const int64_t block = ((int64_t)(count & 1) * p->world + from) * OPJIT_BLOCKS + blockIdx.x;
    return (uint32_t *)p->inbox[at] + (block * OPJIT_WORDS_OF_BLOCK + i) * 4;
}

OPJIT_PEER_FUNCTION void opjit_push(const opjit_peers *p, int to, uint32_t count, int i, opjit_word word)
{
    asm volatile("{\n\t.reg .b128 word;\n\t.reg .b64 low, high;\n\t"
                 "mov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\tmov.b128 word, {low, high};\n\t"
                 "st.relaxed.sys.global.b128 [%0], word;\n\t}" ::"l"(opjit_word_at(p, to, p->rank, count, i)),
                 "r"(word.data[0]), "r"(word.data[1]), "r"(word.data[2]), "r"(count)
                 : "memory");
}

/* Look once, and return whether the word has arrived. */
OPJIT_PEER_FUNCTION bool opjit_peek(const opjit_peers *p, int from, uint32_t count, int i, opjit_word *word)
{
    uint32_t seen;
    asm volatile("{\n\t.reg .b128 word;\n\t.reg .b64 low, high;\n\t"
                 "ld.relaxed.sys.global.b128 word, [%4];\n\tmov.b128 {low, high}, word;\n\t"
                 "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
                 : "=r"(word->data[0]), "=r"(word->data[1]), "=r"(word->data[2]), "=r"(seen)
                 : "l"(opjit_word_at(p, p->rank, from, count, i))
                 : "memory");
    return seen == count;
}

OPJIT_PEER_FUNCTION bool opjit_pull(const opjit_peers *p, int from, uint32_t count, int i, opjit_word *word)
{
    uint64_t since = 0;
    for (uint32_t looks = 1; !opjit_peek(p, from, count, i, word); looks++)
        if (!opjit_patient(p, from, looks, &since))
            return false;
    return true;
}

/*
 * Counts repeat after 2^32 calls, so a word that was not written since then, or never, would seem to have arrived.
 * Therefore, in the two calls before a multiple of 2^24, all words of the other turn get this count before the words of
 * this call allow a rank to send the next ones.
 */
OPJIT_PEER_FUNCTION void opjit_forget_words(const opjit_peers *p, uint32_t count)
{
    for (int from = 0; from < p->world; from++)
        for (int i = opjit_thread(); i < OPJIT_WORDS_OF_BLOCK; i += opjit_threads())
            opjit_word_at(p, p->rank, from, count + 1, i)[3] = count;
    __threadfence_system();
    __syncthreads();
}

/* Call it in all threads of a block. Ranks exchange the called op while the words are on their way. */
OPJIT_PEER_FUNCTION uint32_t opjit_begin_words(const opjit_peers *p)
{
    const uint32_t count = *opjit_count_at(p, blockIdx.x, OPJIT_WORDS) + 1;
    if (((count + 2) & 0xffffff) < 2)
        opjit_forget_words(p, count);
    OPJIT_RANKS_OF_THREAD(r, p)
        opjit_relaxed(opjit_signal_at(p, r, OPJIT_WORDS, blockIdx.x, p->rank), opjit_signal_of(count, p->call));
    return count;
}

OPJIT_PEER_FUNCTION bool opjit_end_words(const opjit_peers *p, uint32_t count, bool came)
{
    came = came && opjit_is_checked(p);
    OPJIT_RANKS_OF_THREAD(r, p)
        came = came && opjit_await(p, OPJIT_WORDS, blockIdx.x, r, opjit_signal_of(count, p->call));
    came = __syncthreads_and(came);
    if (opjit_thread() == 0)
        *opjit_count_at(p, blockIdx.x, OPJIT_WORDS) = count;
    __syncthreads(); /* so that all threads can begin again */
    return came;
}

/*
 * Tiles are for more bytes. A block writes a tile to each rank, signals, and waits for the tiles of the other ranks.
 * Several tiles can be on their way at the same time: you can send the n-th tile when you have read the (n - 2)-th. For
 * example, this is true in a loop that sends step n and then reads step n - 1.
 *
 *     uint32_t count = opjit_begin_tiles(&p, ring);
 *     ... write to opjit_tile(&p, ring, to, p.rank, count) ...
 *     opjit_send_tiles(&p, ring, count);                       // to all ranks
 *     if (!opjit_await_tiles(&p, ring, count))                 // from all ranks
 *         return;
 *     ... read opjit_tile(&p, ring, p.rank, from, count) ...
 *     opjit_end_tiles(&p, ring, count);
 */
OPJIT_PEER_FUNCTION void *opjit_tile(const opjit_peers *p, int ring, int at, int from, uint32_t count)
{
    const int64_t words = (int64_t)2 * p->world * OPJIT_BLOCKS * OPJIT_WORDS_OF_BLOCK * 16;
    const int64_t block = ((int64_t)(ring - OPJIT_RING_A) * p->world + from) * OPJIT_BLOCKS + blockIdx.x;
    return (char *)p->inbox[at] + words + (block * OPJIT_TURNS + count % OPJIT_TURNS) * opjit_tile_bytes(p->world);
}

OPJIT_PEER_FUNCTION uint32_t opjit_begin_tiles(const opjit_peers *p, int ring)
{
    return *opjit_count_at(p, blockIdx.x, ring) + 1;
}

OPJIT_PEER_FUNCTION void opjit_send_tiles(const opjit_peers *p, int ring, uint32_t count)
{
    __syncthreads();
    OPJIT_RANKS_OF_THREAD(r, p)
        opjit_send(p, ring, blockIdx.x, r, opjit_signal_of(count, p->call));
}

OPJIT_PEER_FUNCTION bool opjit_await_tiles(const opjit_peers *p, int ring, uint32_t count)
{
    bool came = opjit_is_checked(p);
    OPJIT_RANKS_OF_THREAD(r, p)
        came = came && opjit_await(p, ring, blockIdx.x, r, opjit_signal_of(count, p->call));
    return __syncthreads_and(came);
}

/* `next` is the count after the last tile. */
OPJIT_PEER_FUNCTION void opjit_end_tiles(const opjit_peers *p, int ring, uint32_t next)
{
    if (opjit_thread() == 0)
        *opjit_count_at(p, blockIdx.x, ring) = next - 1;
    __syncthreads();
}
#endif

#endif
