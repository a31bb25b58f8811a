// The loop: one thread, nothing blocks but the disk.
#define _GNU_SOURCE
#include "agent.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#define MOST 1024

static uint32_t number(const uint8_t *body, uint32_t length, uint32_t at) {
  uint32_t value = 0;
  if (length >= at + 4) memcpy(&value, body + at, 4);
  return value;
}

static void handle(uint32_t type, uint32_t id, const uint8_t *body, uint32_t length) {
  struct stream *s;
  switch (type) {
    case HELLO:  // flag (4), nonce: with the flag set a new host has come, which knows none of the streams
      if (number(body, length, 0)) {
        stream_forget_all();
        file_forget_all();
      }
      wire_send(HELLO, id, body, length);
      break;
    case PING: {
      uint32_t count = number(body, length, 0) ? process_count() : 0;
      wire_send(PONG, id, &count, 4);
      break;
    }
    case SPAWN: process_spawn(id, body, length); break;
    case STDIN: process_stdin(id, body, length); break;
    case STDIN_END: process_stdin_end(id); break;
    case KILL: process_kill(id, number(body, length, 0)); break;
    case RESIZE: process_resize(id, number(body, length, 0), number(body, length, 4)); break;
    case DISCARD:
      if ((s = stream_find(id))) stream_discard(s, number(body, length, 0));
      else file_write_discard(id);
      break;
    case CREDIT:
      if ((s = stream_find(id))) s->credit += number(body, length, 0);
      break;
    case READ: file_read(id, body, length); break;
    case WRITE: file_write(id, body, length); break;
    case WRITE_DATA: file_write_data(id, body, length); break;
    case WRITE_END: file_write_end(id); break;
    case REFRESH: refresh(id, body, length); break;
    case ADDRESS: {  // address and gateway, each ended by a zero
      const char *address = (const char *)body, *end = memchr(body, 0, length);
      if (end && memchr(end + 1, 0, body + length - (const uint8_t *)end - 1)) configure_network(address, end + 1);
      wire_end(id, 0);
      break;
    }
  }
}

static void run(int signals) {
  struct pollfd fds[MOST];
  struct stream *of[MOST];
  for (;;) {
    int n = 0, connected = wire_connected(), room = wire_room();
    fds[n++] = (struct pollfd){.fd = signals, .events = POLLIN};
    fds[n++] = (struct pollfd){.fd = wire_listener(), .events = POLLIN};
    fds[n++] = (struct pollfd){.fd = connected ? wire_fd() : -1, .events = POLLIN | (wire_pending() ? POLLOUT : 0)};
    int first = n;
    for (struct stream *s = streams; s && n + 3 < MOST; s = s->next) {
      for (int i = 0; i < 2; i++)
        if (s->out[i] >= 0 && ((room && s->credit) || s->discard >> i & 1)) {
          of[n] = s;
          fds[n++] = (struct pollfd){.fd = s->out[i], .events = POLLIN};
        }
      if (s->in >= 0 && s->pending_length) {
        of[n] = s;
        fds[n++] = (struct pollfd){.fd = s->in, .events = POLLOUT};
      }
    }
    // A port without a host says so all the time: look again after a while instead.
    if (poll(fds, n, connected ? -1 : 20) < 0 && errno != EINTR) perror("poll");
    if (fds[0].revents) {
      struct signalfd_siginfo info;
      while (read(signals, &info, sizeof info) > 0) {}
      process_reap();
    }
    if (wire_listener() >= 0 && fds[1].revents) wire_accept();
    for (int i = first; i < n; i++) {
      if (!fds[i].revents) continue;
      for (int o = 0; o < 2; o++)
        if (of[i]->out[o] == fds[i].fd && !(fds[i].events & POLLOUT)) stream_pump(of[i], o);
      if (of[i]->in == fds[i].fd) stream_feed(of[i]);
    }
    if (fds[2].fd >= 0 && fds[2].revents & POLLIN && wire_room()) wire_receive(handle);
    for (struct stream *s = streams, *next; s; s = next) {
      next = s->next;
      stream_settle(s);
    }
    wire_flush();
  }
}

int main(void) {
  sigset_t set;
  if (getpid() == 1) boot();
  int console = open("/dev/console", O_WRONLY | O_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC);
  dup2(null, 0);
  dup2(console >= 0 ? console : null, 1);
  dup2(console >= 0 ? console : null, 2);
  signal(SIGPIPE, SIG_IGN);
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigprocmask(SIG_BLOCK, &set, 0);
  int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (score >= 0 && write(score, "-1000", 5) < 0) perror("oom_score_adj");
  if (score >= 0) close(score);
  process_prepare();
  wire_open();
  run(signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
}
