// The channel to the host: a virtio-serial port where there is one, else a vsock listener.
#define _GNU_SOURCE
#include "agent.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <poll.h>
#include <string.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT 5000
static int fd = -1, listener = -1;
static uint8_t in[FRAME_MAX + sizeof(struct header)], out[512u << 10];
static uint32_t in_length, out_start, out_end;

static int find_port(char *path, size_t size) {
  DIR *directory = opendir("/dev");
  struct dirent *entry;
  int found = 0;
  while (directory && !found && (entry = readdir(directory)))
    if (!strncmp(entry->d_name, "vport", 5)) found = snprintf(path, size, "/dev/%s", entry->d_name) > 0;
  if (directory) closedir(directory);
  return found;
}

void wire_open(void) {
  char path[300];
  for (int tries = 0; tries < 2000; tries++) {
    if (find_port(path, sizeof path) && (fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC)) >= 0) return;
    listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = PORT, .svm_cid = VMADDR_CID_ANY};
    if (listener >= 0 && !bind(listener, (void *)&address, sizeof address) && !listen(listener, 4)) return;
    if (listener >= 0) close(listener);
    listener = -1;
    usleep(5000);
  }
}

int wire_fd(void) { return fd; }
int wire_listener(void) { return listener; }

void wire_accept(void) {
  int next = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (next < 0) return;
  if (fd >= 0) close(fd);
  fd = next;
  in_length = out_start = out_end = 0;
}

int wire_connected(void) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  return fd >= 0 && poll(&p, 1, 0) >= 0 && !(p.revents & (POLLHUP | POLLERR));
}

int wire_pending(void) { return out_end > out_start; }
int wire_room(void) { return sizeof out - (out_end - out_start) > 2 * (FRAME_MAX + sizeof(struct header)); }

void wire_flush(void) {
  while (fd >= 0 && out_end > out_start) {
    ssize_t n = write(fd, out + out_start, out_end - out_start);
    if (n <= 0) {
      if (n < 0 && errno != EAGAIN && errno != EINTR && listener >= 0) { close(fd); fd = -1; }
      return;
    }
    out_start += n;
  }
  out_start = out_end = 0;
}

void wire_send(uint32_t type, uint32_t stream, const void *body, uint32_t length) {
  struct header header = {MAGIC, type, stream, length};
  if (out_end + sizeof header + length > sizeof out) {
    memmove(out, out + out_start, out_end - out_start);
    out_end -= out_start;
    out_start = 0;
  }
  if (out_end + sizeof header + length > sizeof out) return;  // nobody listens: see wire_room
  memcpy(out + out_end, &header, sizeof header);
  memcpy(out + out_end + sizeof header, body, length);
  out_end += sizeof header + length;
}

void wire_end(uint32_t stream, int error) {
  uint8_t body[256];
  uint32_t code = error;
  memcpy(body, &code, 4);
  int n = snprintf((char *)body + 4, sizeof body - 4, "%s", error ? strerror(error) : "");
  wire_send(END, stream, body, 4 + n);
}

// Requests may be shorter than their answers.
static void wait_for_room(void) {
  while (fd >= 0 && !wire_room() && wire_connected()) {
    wire_flush();
    if (!wire_room()) poll(&(struct pollfd){.fd = fd, .events = POLLOUT}, 1, 100);
  }
}

void wire_receive(void (*handle)(uint32_t, uint32_t, const uint8_t *, uint32_t)) {
  ssize_t n = read(fd, in + in_length, sizeof in - in_length);
  if (n <= 0) {
    if (listener >= 0 && (n == 0 || (errno != EAGAIN && errno != EINTR))) { close(fd); fd = -1; }
    return;
  }
  in_length += n;
  uint32_t at = 0;
  while (in_length - at >= sizeof(struct header)) {
    struct header header;
    memcpy(&header, in + at, sizeof header);
    if (header.magic != MAGIC || header.length > FRAME_MAX) { at++; continue; }  // after a cut frame: look for the next
    if (in_length - at < sizeof header + header.length) break;
    wait_for_room();
    handle(header.type, header.stream, in + at + sizeof header, header.length);
    at += sizeof header + header.length;
  }
  memmove(in, in + at, in_length - at);
  in_length -= at;
}
