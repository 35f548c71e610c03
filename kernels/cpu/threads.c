/* Where the threads of OpenMP run. */

#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

/* From now on thread i of the caller's team runs on cpus[i] alone, the caller itself as thread 0. Returns how many of them
 * the system did not let be bound. */
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
    return num_failed;
}

/* What the system calls the threads of the caller's team, which is to have `count`. */
int kv_team(int *ids, int count)
{
#pragma omp parallel num_threads(count)
    ids[omp_get_thread_num()] = (int)syscall(SYS_gettid);
    return 0;
}

/* Of the caller's regions from now on, torch's too; the threads that are left out stay and sleep. */
int kv_use_threads(int count)
{
    omp_set_num_threads(count);
    return 0;
}

/* Ends the threads that help the caller; the next region makes new ones. They sleep, but OpenMP counts them: where there
 * are more threads than processors, all wait for one another without spinning, and each wait costs a wake-up.
 */
int kv_let_helpers_go(void)
{
    return omp_pause_resource_all(omp_pause_soft);
}
