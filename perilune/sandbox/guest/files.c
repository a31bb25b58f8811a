// Files: read with credit like a program's output, written beside their place and renamed into it.
#define _GNU_SOURCE
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct upload {
  uint32_t id, mode;
  int fd, error;
  char path[PATH_MAX], beside[PATH_MAX];
  struct upload *next;
};
static struct upload *uploads;

static int copy_path(char *path, const uint8_t *body, uint32_t length) {
  if (length < 1 || length >= PATH_MAX - 32 || body[0] != '/' || memchr(body, 0, length)) return 0;
  memcpy(path, body, length);
  path[length] = 0;
  return 1;
}

void file_read(uint32_t id, const uint8_t *body, uint32_t length) {
  char path[PATH_MAX];
  struct stat status;
  uint64_t limit;
  if (length < 8 || !copy_path(path, body + 8, length - 8)) return wire_end(id, EINVAL);
  memcpy(&limit, body, 8);
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return wire_end(id, errno);
  int error = fstat(fd, &status) ? errno : S_ISDIR(status.st_mode) ? EISDIR : !S_ISREG(status.st_mode) ? EINVAL : 0;
  if (!error && (uint64_t)status.st_size > limit) error = EFBIG;
  if (error) {
    close(fd);
    return wire_end(id, error);
  }
  struct stream *s = stream_new(id);
  s->out[0] = fd;
  s->type[0] = DATA;
}

int make_parents(const char *path) {
  char copy[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", path);
  for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    if (mkdir(copy, 0755) && errno != EEXIST) return -1;
    *slash = '/';
  }
  return 0;
}

void file_write(uint32_t id, const uint8_t *body, uint32_t length) {
  struct upload *u = calloc(1, sizeof *u);
  u->id = id;
  u->fd = -1;
  if (length < 4 || !copy_path(u->path, body + 4, length - 4)) u->error = EINVAL;
  else {
    memcpy(&u->mode, body, 4);
    snprintf(u->beside, sizeof u->beside, "%.*s.%u", PATH_MAX - 16, u->path, id);
    if (make_parents(u->path)) u->error = errno;
    else if ((u->fd = open(u->beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0) u->error = errno;
  }
  u->next = uploads;
  uploads = u;
}

static struct upload *find(uint32_t id) {
  struct upload *u = uploads;
  while (u && u->id != id) u = u->next;
  return u;
}

void file_write_data(uint32_t id, const uint8_t *body, uint32_t length) {
  struct upload *u = find(id);
  uint32_t done = 0;
  wire_send(TAKEN, id, &length, 4);
  while (u && !u->error && done < length) {
    ssize_t n = write(u->fd, body + done, length - done);
    if (n < 0 && errno != EINTR) u->error = errno;
    else if (n > 0) done += n;
  }
}

static void drop(struct upload *u) {
  for (struct upload **link = &uploads; *link; link = &(*link)->next)
    if (*link == u) { *link = u->next; break; }
  if (u->fd >= 0) close(u->fd);
  free(u);
}

static void forget(struct upload *u) {
  if (u->fd >= 0) unlink(u->beside);
  drop(u);
}

void file_write_end(uint32_t id) {
  struct upload *u = find(id);
  if (!u) return wire_end(id, EINVAL);
  if (!u->error && (fchmod(u->fd, u->mode & 07777) || rename(u->beside, u->path))) u->error = errno;
  wire_end(id, u->error);
  if (u->error) forget(u);
  else drop(u);
}

void file_write_discard(uint32_t id) {
  struct upload *u = find(id);
  if (u) forget(u);
}

void file_forget_all(void) {
  while (uploads) forget(uploads);
}
