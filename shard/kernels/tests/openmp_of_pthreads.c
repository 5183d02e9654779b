// The functions that gcc calls for a `#pragma omp parallel for`, made of pthreads: ThreadSanitizer does not see how the
// threads of libgomp wait for each other, and would report races of which there are none.

#include <pthread.h>
#include <stdlib.h>

#define MOST_THREADS 64

struct member {
    void (*run)(void *);
    void * data;
    int number;
    int threads;
};

static _Thread_local struct member * current;

int omp_get_num_threads(void) { return current ? current->threads : 1; }

int omp_get_thread_num(void) { return current ? current->number : 0; }

static void * start(void * given) {
    current = given;
    current->run(current->data);
    return NULL;
}

void GOMP_parallel(void (*run)(void *), void * data, unsigned threads, unsigned flags) {
    (void) flags;
    struct member members[MOST_THREADS];
    pthread_t running[MOST_THREADS];
    if (threads < 1 || threads > MOST_THREADS) {
        abort();
    }
    for (int number = 0; number < (int) threads; number++) {
        members[number] = (struct member) {run, data, number, (int) threads};
        if (number > 0 && pthread_create(&running[number], NULL, start, &members[number]) != 0) {
            abort();
        }
    }
    start(&members[0]);
    for (unsigned number = 1; number < threads; number++) {
        pthread_join(running[number], NULL);
    }
    current = NULL;
}
