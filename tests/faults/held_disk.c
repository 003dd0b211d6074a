/* A disk that takes no more from a checkpoint until a file appears; for LD_PRELOAD.
 * HELD_PATH: part of the names of the files; HELD_UNTIL: the file that is waited for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int fsync(int descriptor) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length > 0 ? length : 0] = 0;
  const char *held = getenv("HELD_PATH"), *until = getenv("HELD_UNTIL");
  if (held && until && strstr(path, held))
    while (access(until, F_OK)) usleep(20000);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
