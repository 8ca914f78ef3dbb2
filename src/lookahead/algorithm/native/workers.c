/* Threads that search for several sequences in parallel. Each search runs on one thread, and no two use the same
   candidates, so the draft tokens do not depend on which thread ran which search.

   Waking a thread takes longer than a search. So the workers are woken in advance (`workers_wake`), when a step of the
   device has ended and its results have yet to be verified. They then poll for tasks, run them and sleep again. Tasks
   never wait for workers: the caller runs all that no worker has started. */

#include "drafter.h"

#if defined(__unix__) || defined(__APPLE__)

#include <pthread.h>
#include <time.h>

#define POLL_NS 3000000 /* how long a worker polls for tasks */
#define POLLS 64        /* polls between two readings of the clock */
#define MAX_TASKS 0xFFFF

/* `state` is the number of a round of tasks (32 bits), its count of tasks, and how many of them were started (16 bits
   each). A worker starts a task by a compare-and-swap that increments the state it has read. If that succeeds, what it
   has read in between belongs to the same round: the next round is written only when all tasks of the last were
   started. */
struct Workers {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    uint32_t wakes, broadcasts; /* calls of workers_wake; the last of them that a worker has passed on to the others */
    uint64_t state, last;       /* `last`: the number of the round before the one for which the workers were woken */
    Task task;
    void *argument;
    int32_t done;
};

static inline void pause_(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Run one task of the round. Returns 0 if none is left. */
static int run_next(Workers *w) {
    uint64_t state = __atomic_load_n(&w->state, __ATOMIC_ACQUIRE);
    for (;;) {
        int32_t index = state & MAX_TASKS;
        if (index >= (int32_t)(state >> 16 & MAX_TASKS)) return 0;
        Task task = __atomic_load_n(&w->task, __ATOMIC_RELAXED);
        void *argument = __atomic_load_n(&w->argument, __ATOMIC_RELAXED);
        if (__atomic_compare_exchange_n(&w->state, &state, state + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            task(argument, index);
            __atomic_add_fetch(&w->done, 1, __ATOMIC_RELEASE);
            return 1;
        }
    }
}

/* Run tasks of the round after the `last` one, if it begins in time. */
static void poll_tasks(Workers *w, uint64_t last) {
    for (int64_t end = now() + POLL_NS; now() < end;) {
        for (int poll = 0; poll < POLLS; poll++) {
            uint64_t round = __atomic_load_n(&w->state, __ATOMIC_ACQUIRE) >> 32;
            if (!run_next(w) && round != last) return;
            pause_();
        }
    }
}

static void *work(void *argument) {
    Workers *w = argument;
    uint32_t wakes = 0;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        while (w->wakes == wakes) pthread_cond_wait(&w->woken, &w->lock);
        wakes = w->wakes;
        if (w->broadcasts != wakes) {
            w->broadcasts = wakes;
            pthread_cond_broadcast(&w->woken);
        }
        uint64_t last = w->last;
        pthread_mutex_unlock(&w->lock);
        poll_tasks(w, last);
    }
    return NULL;
}

/* Start `count` threads, or as many as can be created, which live as long as the process. NULL: out of memory. */
Workers *workers_new(int32_t count) {
    Workers *w = calloc(1, sizeof(Workers));
    if (!w) return NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->woken, NULL);
    for (pthread_t thread; count > 0 && !pthread_create(&thread, NULL, work, w); count--) pthread_detach(thread);
    return w;
}

/* Tasks will follow soon. Waking a thread takes some microseconds, so the caller wakes one, which wakes the others. */
void workers_wake(Workers *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->wakes++;
    w->last = __atomic_load_n(&w->state, __ATOMIC_RELAXED) >> 32;
    pthread_cond_signal(&w->woken);
    pthread_mutex_unlock(&w->lock);
}

/* Run task(argument, index) for all indexes below `count`, together with the workers that are awake. Returns when all
   tasks are done. */
void workers_run(Workers *w, Task task, void *argument, int32_t count) {
    if (!w || count > MAX_TASKS) {
        for (int32_t index = 0; index < count; index++) task(argument, index);
        return;
    }
    uint64_t round = (__atomic_load_n(&w->state, __ATOMIC_RELAXED) >> 32) + 1;
    __atomic_store_n(&w->task, task, __ATOMIC_RELAXED);
    __atomic_store_n(&w->argument, argument, __ATOMIC_RELAXED);
    __atomic_store_n(&w->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&w->state, round << 32 | (uint64_t)count << 16, __ATOMIC_RELEASE);
    while (run_next(w)) continue;
    while (__atomic_load_n(&w->done, __ATOMIC_ACQUIRE) < count) pause_();
}

#else

Workers *workers_new(int32_t count) { return (void)count, NULL; }

void workers_wake(Workers *w) { (void)w; }

void workers_run(Workers *w, Task task, void *argument, int32_t count) {
    (void)w;
    for (int32_t index = 0; index < count; index++) task(argument, index);
}

#endif
