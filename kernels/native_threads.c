/* Where the threads of OpenMP run. */

#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>

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
