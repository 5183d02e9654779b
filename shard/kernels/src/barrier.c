// Lets compute threads wait for each other, which they do at some hundred places of a forward pass.
//
// The barrier of OpenMP spins and then sleeps. Waking takes longer than most parts of a pass; but a thread that spins
// keeps its core from one that computes, and a virtual machine may be stopped for it. Here a thread spins for a moment,
// then offers its core to others over and over, and sleeps only when it waits long, or when another process took what it
// offered for so long that the host must be busy.

#include "barrier.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// So often a thread looks before it offers its core: some microseconds, about as long as an offer takes.
#define SPINS 100
// A core that was away for longer went to another process: routers and kernels take some tenths of a millisecond.
#define BUSY_NS 1000000
// How many waits end in sleep after that, without an offer.
#define BUSY_WAITS 32

// How often a thread looks before it sleeps. The same setting as OpenMP's, with the default of `--spin-count`.
static int most_looks = 3000;
// The threads of all passes that sleep or are about to.
static atomic_int sleepers;
static _Thread_local int busy_waits;

__attribute__((constructor)) static void read_settings(void) {
    const char * given = getenv("GOMP_SPINCOUNT");
    char * end = NULL;
    const long looks = given ? strtol(given, &end, 10) : 0;
    if (end && end != given && looks >= 0) {
        most_looks = looks < INT_MAX ? (int) looks : INT_MAX;
    }
}

static inline void spin(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int has_changed(atomic_int * passed, int before) {
    return atomic_load_explicit(passed, memory_order_acquire) != before;
}

// Return whether ``passed`` changed before it was time to sleep.
static int is_passed_soon(atomic_int * passed, int before) {
    int looks = 0;
    for (; looks < SPINS && looks < most_looks; looks++) {
        if (has_changed(passed, before)) {
            return 1;
        }
        spin();
    }
    if (busy_waits > 0) {
        busy_waits--;
        return has_changed(passed, before);
    }
    int64_t offered = now_ns();
    for (; looks < most_looks; looks++) {
        if (has_changed(passed, before)) {
            return 1;
        }
        sched_yield();
        const int64_t returned = now_ns();
        if (returned - offered > BUSY_NS) {
            busy_waits = BUSY_WAITS;
            break;
        }
        offered = returned;
    }
    return has_changed(passed, before);
}

void caravan_wait_for_all(atomic_int * arrived, atomic_int * passed, int threads) {
    const int before = atomic_load_explicit(passed, memory_order_relaxed);
    if (atomic_fetch_add(arrived, 1) == threads - 1) {
        atomic_store_explicit(arrived, 0, memory_order_relaxed);
        // Either this thread sees who sleeps, or who is about to sleep sees the change.
        atomic_fetch_add(passed, 1);
        if (atomic_load(&sleepers) > 0) {
            syscall(SYS_futex, passed, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
        }
        return;
    }
    if (is_passed_soon(passed, before)) {
        return;
    }
    atomic_fetch_add(&sleepers, 1);
    while (atomic_load(passed) == before) {
        syscall(SYS_futex, passed, FUTEX_WAIT_PRIVATE, before, NULL, NULL, 0);
    }
    atomic_fetch_sub(&sleepers, 1);
}
