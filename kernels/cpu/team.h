/* Work that a thread shares with those that help it. */

#include <stdint.h>

/* One item of a job; thread: which of the team computes it, 0 being the caller. */
typedef void work_on(const void *job, int64_t item, int thread);

/* All items, in any order, by the caller and up to num_threads - 1 helpers; returns when all are done. */
void in_team(work_on *work, const void *job, int64_t num_items, int num_threads);
