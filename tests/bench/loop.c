/* The measured loop in plain C, for tests/bench/loop.py: what replayer/loop.py is compared with.

   Threads take accesses by an atomic ticket, one per event with a barrier at its end, or one for all without; each
   access is timed and its bytes go to the thread's own slot. Built as a shared library, so that files, slots and
   process are the same for both loops. */

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Fields as in Plan of tests/bench/loop.py. Of each event (num_events + 1): event_first_access. Of each access: fd,
   offset, length, begin_ns, end_ns, returned, and source, where its bytes are copied from, null to read them all.
   ticket: (num_events,), zero. stop: set from outside, or by a failure. */
struct plan {
    int64_t num_threads, num_events, has_barrier, slot_bytes;
    const int64_t *event_first_access;
    const int32_t *fd;
    const int64_t *offset, *length;
    char *const *source;
    char *slots;
    int64_t *ticket, *stop, *begin_ns, *end_ns, *returned;
};

struct thread {
    const struct plan *plan;
    pthread_barrier_t *barrier;
    int64_t number;
    pthread_t id;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void read_access(const struct plan *plan, char *slot, int64_t access) {
    int64_t got = 0, length = plan->length[access];
    plan->begin_ns[access] = now_ns();
    if (plan->source) {
        memcpy(slot, plan->source[access], length);
        got = length;
    }
    while (got < length) {
        ssize_t count = pread(plan->fd[access], slot + got, length - got, plan->offset[access] + got);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            got = -errno;
        if (count <= 0)
            break;
        got += count;
    }
    plan->end_ns[access] = now_ns();
    plan->returned[access] = got;
    if (got != length)
        __atomic_store_n(plan->stop, 1, __ATOMIC_RELEASE);
}

static void *work(void *argument) {
    struct thread *thread = argument;
    const struct plan *plan = thread->plan;
    char *slot = plan->slots + thread->number * plan->slot_bytes;
    pthread_barrier_wait(thread->barrier);
    if (!plan->has_barrier) {
        int64_t access, end = plan->event_first_access[plan->num_events];
        while (!__atomic_load_n(plan->stop, __ATOMIC_ACQUIRE)) {
            access = __atomic_fetch_add(plan->ticket, 1, __ATOMIC_ACQ_REL);
            if (access >= end)
                break;
            read_access(plan, slot, access);
        }
        return 0;
    }
    for (int64_t event = 0; event < plan->num_events; event++) {
        int64_t first = plan->event_first_access[event], end = plan->event_first_access[event + 1], access;
        while ((access = first + __atomic_fetch_add(plan->ticket + event, 1, __ATOMIC_ACQ_REL)) < end)
            if (!__atomic_load_n(plan->stop, __ATOMIC_ACQUIRE))
                read_access(plan, slot, access);
        pthread_barrier_wait(thread->barrier);
    }
    return 0;
}

/* Runs the plan; 0, or the error number of what could not be started. */
int run(const struct plan *plan) {
    static struct thread threads[64];
    static pthread_barrier_t barrier;
    if (plan->num_threads > 64)
        return EINVAL;
    int failed = pthread_barrier_init(&barrier, 0, plan->num_threads);
    if (failed)
        return failed;
    for (int64_t number = 0; number < plan->num_threads; number++) {
        threads[number] = (struct thread){.plan = plan, .barrier = &barrier, .number = number};
        failed = pthread_create(&threads[number].id, 0, work, &threads[number]);
        if (failed) /* Those that were started wait at the barrier until the process ends. */
            return failed;
    }
    for (int64_t number = 0; number < plan->num_threads; number++)
        pthread_join(threads[number].id, 0);
    return pthread_barrier_destroy(&barrier);
}
