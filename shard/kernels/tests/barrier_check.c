// Lets threads meet at the barrier again and again: `barrier_check THREADS MEETINGS PAUSE_US`. One of them pauses before
// each meeting. Exits with 1 if a thread went on before all had come.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "barrier.h"

#define MOST_THREADS 64

static atomic_int arrived, passed, came_early;
// At which meeting each thread is, for odd ones and even ones, so that a thread that is a meeting ahead changes nothing
// that others still read. No atomics: the barrier alone must make them visible.
static int come[2][MOST_THREADS];
static int threads, meetings, pause_us;

static void * meet(void * own) {
    const int number = (int) (intptr_t) own;
    for (int meeting = 1; meeting <= meetings; meeting++) {
        if (number == 0 && pause_us > 0) {
            usleep(pause_us);
        }
        come[meeting % 2][number] = meeting;
        caravan_wait_for_all(&arrived, &passed, threads);
        for (int other = 0; other < threads; other++) {
            if (come[meeting % 2][other] != meeting) {
                atomic_fetch_add(&came_early, 1);
            }
        }
    }
    return NULL;
}

int main(int count, char ** given) {
    if (count != 4 || (threads = atoi(given[1])) > MOST_THREADS) {
        return 2;
    }
    meetings = atoi(given[2]);
    pause_us = atoi(given[3]);
    pthread_t running[MOST_THREADS];
    for (int number = 0; number < threads; number++) {
        pthread_create(&running[number], NULL, meet, (void *) (intptr_t) number);
    }
    for (int number = 0; number < threads; number++) {
        pthread_join(running[number], NULL);
    }
    printf("%d\n", atomic_load(&passed));
    return atomic_load(&came_early) > 0;
}
