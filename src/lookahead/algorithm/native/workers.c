/* Threads that share the search of many sequences. Each search is done by one thread, and no two touch the same
   candidates, so the guesses do not depend on who did what.

   A sleeping thread takes longer to wake than a search takes. So the workers are woken beforehand (`workers_wake`), when
   a step of the device has ended and its results have yet to be verified. They then watch for work, do it and sleep again.
   Work never waits for them: whoever hands it out does all that no worker takes. */

#include "drafter.h"

#if defined(__unix__) || defined(__APPLE__)

#include <pthread.h>
#include <time.h>

#define WATCH_NS 3000000 /* how long a worker watches for work that does not come */
#define TURNS 64         /* looks for work between two looks at the clock */
#define MOST_PLACES 0xFFFF

/* `ticket` is the number of a handout (32 bits), how many places it has, and how many of them are taken (16 bits
   each). A worker takes a place by raising the ticket that it has seen by one. If that succeeds, what it has read
   since was of the same handout: the next one is written only when all places of the last are taken. */
struct Workers {
    pthread_mutex_t lock;
    pthread_cond_t woken;
    uint32_t wakes, told; /* how often the workers were to be woken, and how often one of them has told the others */
    uint64_t ticket, last; /* `last`: the number of the handout before the one that the workers were woken for */
    Search search;
    void *job;
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

/* Do one place of the handout. Returns 0 when there is none left. */
static int do_one(Workers *w) {
    uint64_t seen = __atomic_load_n(&w->ticket, __ATOMIC_ACQUIRE);
    for (;;) {
        int32_t place = seen & MOST_PLACES;
        if (place >= (int32_t)(seen >> 16 & MOST_PLACES)) return 0;
        Search search = __atomic_load_n(&w->search, __ATOMIC_RELAXED);
        void *job = __atomic_load_n(&w->job, __ATOMIC_RELAXED);
        if (__atomic_compare_exchange_n(&w->ticket, &seen, seen + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            search(job, place);
            __atomic_add_fetch(&w->done, 1, __ATOMIC_RELEASE);
            return 1;
        }
    }
}

/* Do what there is to do of the next handout after the `last` one, if it comes in time. */
static void watch(Workers *w, uint64_t last) {
    for (int64_t end = now() + WATCH_NS; now() < end;) {
        for (int turn = 0; turn < TURNS; turn++) {
            uint64_t handout = __atomic_load_n(&w->ticket, __ATOMIC_ACQUIRE) >> 32;
            if (!do_one(w) && handout != last) return;
            pause_();
        }
    }
}

static void *work(void *of) {
    Workers *w = of;
    uint32_t wakes = 0;
    for (;;) {
        pthread_mutex_lock(&w->lock);
        while (w->wakes == wakes) pthread_cond_wait(&w->woken, &w->lock);
        wakes = w->wakes;
        if (w->told != wakes) {
            w->told = wakes;
            pthread_cond_broadcast(&w->woken);
        }
        uint64_t last = w->last;
        pthread_mutex_unlock(&w->lock);
        watch(w, last);
    }
    return NULL;
}

/* So many threads, which live as long as the process. Those that cannot be made are left out. NULL: out of memory. */
Workers *workers_new(int32_t count) {
    Workers *w = calloc(1, sizeof(Workers));
    if (!w) return NULL;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->woken, NULL);
    for (pthread_t thread; count > 0 && !pthread_create(&thread, NULL, work, w); count--) pthread_detach(thread);
    return w;
}

/* Work is about to come. To wake a thread takes the caller some microseconds, so it wakes one, who wakes the others. */
void workers_wake(Workers *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->wakes++;
    w->last = __atomic_load_n(&w->ticket, __ATOMIC_RELAXED) >> 32;
    pthread_cond_signal(&w->woken);
    pthread_mutex_unlock(&w->lock);
}

/* Search at all places from 0 on, together with the workers who are awake. Returns when all are done. */
void workers_share(Workers *w, Search search, void *job, int32_t places) {
    if (!w || places > MOST_PLACES) {
        for (int32_t place = 0; place < places; place++) search(job, place);
        return;
    }
    uint64_t handout = (__atomic_load_n(&w->ticket, __ATOMIC_RELAXED) >> 32) + 1;
    __atomic_store_n(&w->search, search, __ATOMIC_RELAXED);
    __atomic_store_n(&w->job, job, __ATOMIC_RELAXED);
    __atomic_store_n(&w->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&w->ticket, handout << 32 | (uint64_t)places << 16, __ATOMIC_RELEASE);
    while (do_one(w)) continue;
    while (__atomic_load_n(&w->done, __ATOMIC_ACQUIRE) < places) pause_();
}

#else

Workers *workers_new(int32_t count) { return (void)count, NULL; }

void workers_wake(Workers *w) { (void)w; }

void workers_share(Workers *w, Search search, void *job, int32_t places) {
    (void)w;
    for (int32_t place = 0; place < places; place++) search(job, place);
}

#endif
