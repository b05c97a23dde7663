// Preloaded: adds the seconds in the file that CLOCK_JUMP names to the wall clock of a process, as they stand there
// at each moment. The monotonic clock goes on as ever, as when an administrator sets a machine's clock.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *jump_s;

__attribute__((constructor)) static void open_jump(void) {
    const char *path = getenv("CLOCK_JUMP");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof *jump_s, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) jump_s = found;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && jump_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *jump_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME_COARSE, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
