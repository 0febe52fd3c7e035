/* The part of gcc's OpenMP library that the kernels use, with POSIX threads, which the thread sanitizer understands: it knows
 * nothing of how gcc's own library makes threads wait for each other, and would report every sum. New threads for each parallel
 * region; their number is that of the environment variable KERNEL_THREADS, or 3. */

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct {
    void (*body)(void *);
    void *data;
    int threads, singles, loops; /* constructs that some thread has begun */
    long next, end, chunk;       /* of the loop that is running */
    pthread_barrier_t barrier;
    pthread_mutex_t lock;
} Team;

static Team alone = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER};
static __thread Team *team = &alone;
static __thread int me, my_singles, my_loops;

typedef struct { Team *team; int number; } Start;

static void *work(void *start) {
    team = ((Start *)start)->team, me = ((Start *)start)->number, my_singles = my_loops = 0;
    team->body(team->data);
    return NULL;
}

void GOMP_parallel(void (*body)(void *), void *data, unsigned wanted, unsigned flags) {
    const char *given = getenv("KERNEL_THREADS");
    int threads = wanted || team != &alone ? 1 : given ? atoi(given) : 3; /* wanted is 1 if the region's condition is false */
    Team new = {.body = body, .data = data, .threads = threads, .lock = PTHREAD_MUTEX_INITIALIZER}, *before = team;
    Start starts[threads];
    pthread_t others[threads];
    int number = me, singles = my_singles, loops = my_loops;
    (void)flags;
    pthread_barrier_init(&new.barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) starts[i] = (Start){&new, i};
    for (int i = 1; i < threads; i++)
        if (pthread_create(others + i, NULL, work, starts + i)) abort();
    work(starts);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    pthread_barrier_destroy(&new.barrier);
    team = before, me = number, my_singles = singles, my_loops = loops;
}

int omp_get_num_threads(void) { return team->threads; }
int omp_get_thread_num(void) { return me; }
void GOMP_barrier(void) {
    if (team->threads > 1) pthread_barrier_wait(&team->barrier);
}

/* Whether the calling thread is the first at its next single construct */
bool GOMP_single_start(void) {
    pthread_mutex_lock(&team->lock);
    bool first = my_singles++ == team->singles;
    team->singles += first;
    pthread_mutex_unlock(&team->lock);
    return first;
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *from, long *to) {
    pthread_mutex_lock(&team->lock);
    *from = team->next;
    *to = *from + team->chunk < team->end ? *from + team->chunk : team->end;
    team->next = *to;
    pthread_mutex_unlock(&team->lock);
    return *from < *to;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *from, long *to) {
    if (step != 1) abort();
    pthread_mutex_lock(&team->lock);
    if (my_loops++ == team->loops) team->loops++, team->next = start, team->end = end, team->chunk = chunk;
    pthread_mutex_unlock(&team->lock);
    return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end(void) { GOMP_barrier(); }
