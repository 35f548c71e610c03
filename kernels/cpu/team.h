/* Work that a thread shares with its helpers. */

#include <stdint.h>

/* One item of a job. thread: the member of the team that computes it; 0 is the caller. */
typedef void work_on(const void *job, int64_t item, int thread);

/* The caller and up to num_threads - 1 helpers compute all items, in any order. Returns when all are done. */
void in_team(work_on *work, const void *job, int64_t num_items, int num_threads);
