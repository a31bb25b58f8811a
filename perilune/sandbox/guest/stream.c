// Streams: what a program prints or a file holds goes to the host as far as the host has given credit.
#define _GNU_SOURCE
#include "agent.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <stdio.h>
#include <fcntl.h>

struct stream *streams;

struct stream *stream_new(uint32_t id) {
  struct stream *s = calloc(1, sizeof *s);
  *s = (struct stream){.id = id, .out = {-1, -1}, .in = -1, .credit = WINDOW, .next = streams};
  return streams = s;
}

struct stream *stream_find(uint32_t id) {
  for (struct stream *s = streams; s; s = s->next)
    if (s->id == id && !s->orphan) return s;
  return 0;
}

void stream_forget_all(void) {
  for (struct stream *s = streams; s; s = s->next) {
    s->orphan = s->reported = 1;
    s->discard = 3;
    if (!s->pid) {
      if (s->out[0] >= 0) close(s->out[0]);
      s->out[0] = -1;
    }
  }
}

static void close_output(struct stream *s, int which) {
  close(s->out[which]);
  if (s->in == s->out[which]) s->in = -1;  // a terminal is one descriptor
  s->out[which] = -1;
}

void stream_discard(struct stream *s, int which) {
  s->discard |= which;
  if (!s->pid && s->out[0] >= 0) close_output(s, 0);
}

void stream_pump(struct stream *s, int which) {
  static uint8_t buffer[FRAME_MAX];
  int drop = s->discard >> which & 1;
  uint32_t most = drop ? sizeof buffer : s->credit < sizeof buffer ? s->credit : sizeof buffer;
  if (!most || (!drop && !wire_room())) return;  // others may have taken the room since this one was found readable
  ssize_t n = read(s->out[which], buffer, most);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (n <= 0) {
    int file = !s->pid;
    close_output(s, which);
    if (file) wire_end(s->id, n < 0 ? errno : 0);
    return;
  }
  if (drop) return;
  s->credit -= n;
  wire_send(s->type[which], s->id, buffer, n);
}

void stream_feed(struct stream *s) {
  while (s->in >= 0 && s->pending_length) {
    ssize_t n = write(s->in, s->pending, s->pending_length);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    uint32_t taken = n < 0 ? s->pending_length : n;  // a program that closed its stdin takes no more: drop it
    s->pending_length -= taken;
    memmove(s->pending, s->pending + taken, s->pending_length);
    wire_send(TAKEN, s->id, &taken, 4);
    if (n < 0 && !s->pty) { close(s->in); s->in = -1; }
  }
  if (s->in_ends && !s->pending_length && s->in >= 0) {
    if (s->pty) {
      uint8_t end_of_file = 4;
      if (write(s->in, &end_of_file, 1) < 0) {}
    } else {
      close(s->in);
      s->in = -1;
    }
    s->in_ends = 0;
  }
}

static int open_outputs(struct stream *s) { return s->out[0] >= 0 || s->out[1] >= 0; }

void stream_settle(struct stream *s) {
  if (s->pid && s->exited && !s->reported) {
    // What the program printed before its end comes first; what its children print later is dropped.
    for (int i = 0; i < 2; i++) {
      uint32_t before;
      do {
        before = s->credit;
        if (s->out[i] >= 0 && wire_room()) stream_pump(s, i);
      } while (s->credit != before && s->out[i] >= 0);
      if (s->out[i] >= 0 && !(s->discard >> i & 1) && (!s->credit || !wire_room())) return;
    }
    int32_t status = s->status;
    wire_send(EXIT, s->id, &status, 4);
    s->reported = 1;
    s->discard = 3;
    if (s->in >= 0 && !s->pty) close(s->in);
    s->in = -1;
  }
  int done = s->pid ? s->exited && s->reported && !open_outputs(s) : !open_outputs(s);
  if (!done) return;
  for (struct stream **link = &streams; *link; link = &(*link)->next)
    if (*link == s) { *link = s->next; break; }
  if (s->group[0]) rmdir(s->group);  // fails while children run: then it stays, they may be killed by hand
  free(s->pending);
  free(s);
}
