// After a restore: what must not be shared with the machine that this one is a copy of.
#define _GNU_SOURCE
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define ENTROPY 32

static void write_machine_id(const uint8_t *random) {
  char text[34];
  for (int i = 0; i < 16; i++) sprintf(text + 2 * i, "%02x", random[i]);
  text[32] = '\n';
  int fd = open("/run/machine-id", O_WRONLY | O_TRUNC | O_CLOEXEC);
  if (fd < 0) return;
  if (write(fd, text, 33) < 0) {}
  close(fd);
}

// body: seconds (8), nanoseconds (8); and where more than the clock is stale: entropy for the generator (32), random
// bytes for the machine id (16), host name
void refresh(uint32_t stream, const uint8_t *body, uint32_t length) {
  int64_t when[2];
  struct { int bits, bytes; uint8_t data[ENTROPY]; } entropy = {8 * ENTROPY, ENTROPY, {0}};
  if (length != 16 && length < 64) return wire_end(stream, EINVAL);
  memcpy(when, body, 16);
  struct timespec now = {.tv_sec = when[0], .tv_nsec = when[1]};
  int error = clock_settime(CLOCK_REALTIME, &now) ? errno : 0;
  if (length == 16) return wire_end(stream, error);
  memcpy(entropy.data, body + 16, ENTROPY);
  int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
  if (fd < 0 || ioctl(fd, RNDADDENTROPY, &entropy) || ioctl(fd, RNDRESEEDCRNG)) error = errno;
  if (fd >= 0) close(fd);
  if (length > 64 && sethostname((const char *)body + 64, length - 64)) error = errno;
  write_machine_id(body + 48);
  wire_end(stream, error);
}
