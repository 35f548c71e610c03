/* Where the threads of OpenMP run, and a team of our own for the products and the attention of this folder.
 *
 * A model whose products are all computed here has such a team. OpenMP ends a region when every thread has reached its
 * end, even a thread that has nothing to do and waits for a processor. Here the caller waits only for items that are
 * being computed. A helper yields its processor between two items, before it is taken away in the middle of one, so
 * nobody waits beside other work (bench/LOG.md). */

#define _GNU_SOURCE
#include "team.h"
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_HELPERS 255
#define CLOSED UINT32_MAX       /* as the next item: the job is being replaced */
#define HELD_NS 1000000         /* for which a helper holds a processor before it offers it to others */
#define IDLE_HELD_NS 20000      /* the same while there is nothing to do */
#define AWAKE_NS 3000000        /* without work, after which a helper sleeps */

/* The current job. A helper may be stopped anywhere for any time. It takes an item by exchanging `next`, whose upper
 * half is the number of the job, so it never takes an item of a job that has ended. */
static struct {
    _Alignas(64) _Atomic uint64_t next; /* number of the job, and its next item */
    _Alignas(64) _Atomic int64_t num_done;
    _Alignas(64) _Atomic uint32_t num_jobs; /* helpers sleep on it */
    _Atomic int num_asleep;
    _Atomic(work_on *) work;
    _Atomic(const void *) job;
    _Atomic int64_t num_items;
    _Atomic int num_threads;
} team;

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* the caller holds it, and changes the following */
static int num_helpers;
static _Atomic int helper_ids[MAX_HELPERS]; /* thread ids of the system; 0: not running yet */
static int helper_cpus[MAX_HELPERS], num_helper_cpus;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Computes one item, if there is one. Returns whether there was. */
static bool take_one(int thread)
{
    uint64_t next = atomic_load(&team.next);
    while ((uint32_t)next != CLOSED) {
        work_on *work = atomic_load(&team.work);
        const void *job = atomic_load(&team.job);
        if ((uint32_t)next >= atomic_load(&team.num_items) || thread >= atomic_load(&team.num_threads))
            return false;
        if (atomic_compare_exchange_strong(&team.next, &next, next + 1)) {
            work(job, (uint32_t)next, thread);
            atomic_fetch_add(&team.num_done, 1);
            return true;
        }
    }
    return false;
}

static void bind_to(int id, int cpu)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    sched_setaffinity(id, sizeof cpus, &cpus);
}

static void sleep_until_work(void)
{
    uint32_t seen = atomic_load(&team.num_jobs);
    atomic_fetch_add(&team.num_asleep, 1);
    uint64_t next = atomic_load(&team.next);
    if ((uint32_t)next == CLOSED || (uint32_t)next >= atomic_load(&team.num_items))
        syscall(SYS_futex, &team.num_jobs, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
    atomic_fetch_sub(&team.num_asleep, 1);
}

static void *help(void *number)
{
    int thread = (int)(intptr_t)number + 1;
    atomic_store(&helper_ids[thread - 1], (int)syscall(SYS_gettid));
    int64_t held_since = now_ns(), worked_at = held_since;
    for (;;) {
        bool worked = take_one(thread);
        int64_t now = now_ns();
        if (worked)
            worked_at = now;
        if (now - worked_at > AWAKE_NS) {
            sleep_until_work();
            held_since = worked_at = now_ns();
        } else if (now - held_since > (worked ? HELD_NS : IDLE_HELD_NS)) {
            sched_yield();
            held_since = now_ns();
        } else if (!worked) {
            __builtin_ia32_pause();
        }
    }
    return 0;
}

static void start_helpers(int count)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (; num_helpers < count && num_helpers < MAX_HELPERS; num_helpers++) {
        pthread_t helper;
        if (pthread_create(&helper, 0, help, (void *)(intptr_t)num_helpers) != 0)
            break;
        pthread_detach(helper);
        if (num_helpers < num_helper_cpus) {
            cpu_set_t cpus;
            CPU_ZERO(&cpus);
            CPU_SET(helper_cpus[num_helpers], &cpus);
            pthread_setaffinity_np(helper, sizeof cpus, &cpus);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

static _Thread_local bool has_own_team; /* of the calling thread */

void in_team(work_on *work, const void *job, int64_t num_items, int num_threads)
{
    bool is_alone = num_items < 2 || num_threads < 2;
    if (!is_alone && !has_own_team) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
        for (int64_t item = 0; item < num_items; item++)
            work(job, item, omp_get_thread_num());
        return;
    }
    if (is_alone || pthread_mutex_trylock(&owner) != 0) {
        for (int64_t item = 0; item < num_items; item++)
            work(job, item, 0);
        return;
    }
    if (num_helpers < num_threads - 1)
        start_helpers(num_threads - 1);
    uint64_t number = (uint64_t)atomic_load(&team.num_jobs) + 1;
    atomic_store(&team.next, number << 32 | CLOSED);
    atomic_store(&team.work, work);
    atomic_store(&team.job, job);
    atomic_store(&team.num_items, num_items);
    atomic_store(&team.num_threads, num_threads);
    atomic_store(&team.num_done, 0);
    atomic_store(&team.next, number << 32);
    atomic_fetch_add(&team.num_jobs, 1);
    if (atomic_load(&team.num_asleep))
        syscall(SYS_futex, &team.num_jobs, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    while (take_one(0))
        ;
    while (atomic_load(&team.num_done) < num_items)
        __builtin_ia32_pause();
    pthread_mutex_unlock(&owner);
}

/* From now on, thread i of the caller's team runs only on cpus[i]; the caller is thread 0. Returns how many of them the
 * system refused to bind. */
int kv_bind_threads(const int *cpus, int count)
{
    int num_failed = 0;
#pragma omp parallel num_threads(count) reduction(+ : num_failed)
    {
        cpu_set_t cpu;
        CPU_ZERO(&cpu);
        CPU_SET(cpus[omp_get_thread_num()], &cpu);
        num_failed += sched_setaffinity(0, sizeof cpu, &cpu) != 0;
    }
    pthread_mutex_lock(&owner);
    num_helper_cpus = 0;
    for (int i = 0; num_failed == 0 && i + 1 < count && i < MAX_HELPERS; i++) {
        helper_cpus[num_helper_cpus++] = cpus[i + 1];
        if (i < num_helpers && atomic_load(&helper_ids[i]))
            bind_to(atomic_load(&helper_ids[i]), cpus[i + 1]);
    }
    pthread_mutex_unlock(&owner);
    return num_failed;
}

/* The system's ids of the threads of the caller's team, which is to have `count`; 0 for one that does not run yet. */
int kv_team(int *ids, int count, int is_own)
{
    if (is_own) {
        ids[0] = (int)syscall(SYS_gettid);
        for (int i = 1; i < count; i++)
            ids[i] = i <= MAX_HELPERS ? atomic_load(&helper_ids[i - 1]) : 0;
        return 0;
    }
#pragma omp parallel num_threads(count)
    ids[omp_get_thread_num()] = (int)syscall(SYS_gettid);
    return 0;
}

/* The number of threads of the caller's regions of OpenMP from now on, including torch's. Unused threads stay and
 * sleep. is_own: the code of this folder has a team of its own. */
int kv_use_threads(int count, int is_own)
{
    omp_set_num_threads(count);
    has_own_team = is_own;
    return 0;
}

/* Ends the threads that help the caller; the next region makes new ones. They sleep, but OpenMP counts them: if there
 * are more threads than processors, all wait for one another without spinning, and each wait costs a wake-up. */
int kv_let_helpers_go(void)
{
    return omp_pause_resource_all(omp_pause_soft);
}
