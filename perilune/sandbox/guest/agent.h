// The guest's side of the sandbox: process 1 of the guest. Frames are described in ../wire.py.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define MAGIC 0x314c5250u
#define FRAME_MAX 65536u
#define WINDOW (256u << 10)

enum {  // frame types, the same numbers as in ../wire.py
  HELLO = 1, PING = 2, SPAWN = 3, STDIN = 4, STDIN_END = 5, KILL = 6, RESIZE = 7, DISCARD = 8, READ = 9,
  WRITE = 10, WRITE_DATA = 11, WRITE_END = 12, REFRESH = 13, CREDIT = 14, ADDRESS = 15,
  PONG = 18, STARTED = 20, STDOUT = 21, STDERR = 22, EXIT = 23, DATA = 24, END = 25, TAKEN = 26,
};

struct header { uint32_t magic, type, stream, length; };

// boot.c: mounts, modules, root file system
void boot(void);
void configure_network(const char *address, const char *gateway);

// wire.c: the channel to the host
void wire_open(void);
int wire_fd(void);
int wire_listener(void);
void wire_accept(void);
int wire_connected(void);
int wire_pending(void);
int wire_room(void);            // true if a data frame of full size can be queued, and many small ones
void wire_flush(void);
void wire_receive(void (*handle)(uint32_t type, uint32_t stream, const uint8_t *body, uint32_t length));
void wire_send(uint32_t type, uint32_t stream, const void *body, uint32_t length);
void wire_end(uint32_t stream, int error);

// process.c: programs, one stream each
void process_prepare(void);
void process_spawn(uint32_t stream, const uint8_t *body, uint32_t length);
void process_stdin(uint32_t stream, const uint8_t *body, uint32_t length);
void process_stdin_end(uint32_t stream);
void process_kill(uint32_t stream, int signal);
void process_resize(uint32_t stream, uint32_t rows, uint32_t columns);
void process_reap(void);
int process_count(void);

// stream.c: file descriptors that are read for the host, with credit
struct stream {
  uint32_t id;
  int out[2], in;               // stdout, stderr; stdin; -1 where there is none
  uint32_t type[2];             // frame type of each output
  pid_t pid;                    // of a program; 0 for a file
  int status, exited, reported, orphan, pty;
  int discard;                  // bit 0: stdout is dropped, bit 1: stderr
  uint32_t credit;
  uint8_t *pending;             // stdin that the program has not taken yet
  uint32_t pending_length;
  int in_ends;
  char group[64];               // its control group, or empty
  struct stream *next;
};
extern struct stream *streams;
struct stream *stream_new(uint32_t id);
struct stream *stream_find(uint32_t id);
void stream_forget_all(void);   // a new host: programs go on, their output is dropped
void stream_discard(struct stream *s, int which);  // bits as in `discard`; a file is closed
void stream_pump(struct stream *s, int which);
void stream_feed(struct stream *s);
void stream_settle(struct stream *s);  // report the end, free what is done

// files.c
void file_read(uint32_t stream, const uint8_t *body, uint32_t length);
void file_write(uint32_t stream, const uint8_t *body, uint32_t length);
void file_write_data(uint32_t stream, const uint8_t *body, uint32_t length);
void file_write_end(uint32_t stream);
void file_write_discard(uint32_t stream);
void file_forget_all(void);
int make_parents(const char *path);

// refresh.c
void refresh(uint32_t stream, const uint8_t *body, uint32_t length);
