// Programs: spawned into a control group of their own, so that a whole tree can be killed, daemons included.
#define _GNU_SOURCE
#include "agent.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define GROUPS "/sys/fs/cgroup"

struct request {
  uint32_t flags, rows, columns, argc, envc;
  const char *cwd, *user;
  char **argv, **env;
};
enum { WITH_PTY = 1, WITH_STDIN = 2 };

static const char *next_string(const uint8_t **at, const uint8_t *end) {
  const uint8_t *nul = memchr(*at, 0, end - *at);
  if (!nul) return 0;
  const char *s = (const char *)*at;
  *at = nul + 1;
  return s;
}

static int parse(struct request *r, const uint8_t *body, uint32_t length) {
  const uint8_t *at = body + 20, *end = body + length;
  if (length < 20) return 0;
  memcpy(r, body, 20);
  if (r->argc < 1 || r->argc > FRAME_MAX || r->envc > FRAME_MAX) return 0;
  if (!(r->cwd = next_string(&at, end)) || !(r->user = next_string(&at, end))) return 0;
  r->argv = calloc(r->argc + 1, sizeof(char *));
  r->env = calloc(r->envc + 1, sizeof(char *));
  for (uint32_t i = 0; i < r->argc; i++)
    if (!(r->argv[i] = (char *)next_string(&at, end))) return 0;
  for (uint32_t i = 0; i < r->envc; i++)
    if (!(r->env[i] = (char *)next_string(&at, end))) return 0;
  return 1;
}

// The line of /etc/passwd or /etc/group with this name or number (its third field), split in `line`; 0 if there is none.
static int find_line(const char *path, const char *name, char *line, size_t size, char *fields[7]) {
  FILE *file = fopen(path, "re");
  int found = 0;
  while (file && !found && fgets(line, size, file)) {
    char *rest = line;
    for (int i = 0; i < 7; i++) fields[i] = rest ? strsep(&rest, ":\n") : 0;
    found = fields[3] && (!strcmp(fields[0], name) || !strcmp(fields[2], name));
  }
  if (file) fclose(file);
  return found;
}

// uid, gid and home of USER or USER:GROUP, names or numbers; 0 if there is no such user or group.
static int find_user(const char *name, uid_t *uid, gid_t *gid, char *home, size_t size) {
  char line[1024], user[64], *fields[7], *group;
  snprintf(user, sizeof user, "%s", name);
  if ((group = strchr(user, ':'))) *group++ = 0;
  if (!strcmp(user, "root")) {
    *uid = *gid = 0;
    snprintf(home, size, "/root");
  } else if (find_line("/etc/passwd", user, line, sizeof line, fields) && fields[5]) {
    *uid = atoi(fields[2]);
    *gid = atoi(fields[3]);
    snprintf(home, size, "%s", fields[5]);
  } else if (isdigit((unsigned char)user[0])) {
    *uid = *gid = atoi(user);
    snprintf(home, size, "/");
  } else {
    return 0;
  }
  if (!group || !*group) return 1;
  if (find_line("/etc/group", group, line, sizeof line, fields)) *gid = atoi(fields[2]);
  else if (isdigit((unsigned char)group[0])) *gid = atoi(group);
  else return 0;
  return 1;
}

static int write_file(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  ssize_t n = write(fd, text, strlen(text));
  close(fd);
  return n < 0 ? -1 : 0;
}

// The group of the next program is made when the last one has been started: then nobody waits for it.
static char next_group[64];

void process_prepare(void) {
  static unsigned count;
  char path[80];
  snprintf(next_group, sizeof next_group, GROUPS "/exec.%u", count++);
  if (mkdir(next_group, 0755)) {
    next_group[0] = 0;
    return;
  }
  snprintf(path, sizeof path, "%s/pids.max", next_group);
  write_file(path, "1024");
}

// fork, with the child born in the group: moving it there would take longer than the fork.
static pid_t fork_into(const char *group) {
  struct clone_args args = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD};
  int fd = group[0] ? open(group, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (fd < 0) return fork();
  args.cgroup = fd;
  pid_t pid = syscall(SYS_clone3, &args, sizeof args);
  if (pid) close(fd);
  return pid;
}

static _Noreturn void child(struct request *r, int in, int out, int err, int report) {
  char home[256], text[300];
  uid_t uid = 0;
  gid_t gid = 0;
  int error = 0;
  setsid();
  write_file("/proc/self/oom_score_adj", "0");
  if (r->flags & WITH_PTY) ioctl(in, TIOCSCTTY, 0);
  dup2(in, 0);
  dup2(out, 1);
  dup2(err, 2);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, 0);
  signal(SIGPIPE, SIG_DFL);
  if (!find_user(r->user, &uid, &gid, home, sizeof home)) error = ENOENT;
  if (!error && (uid || gid) && (setgroups(0, 0) || setgid(gid) || setuid(uid))) error = errno;
  if (!error && chdir(r->cwd)) error = errno;
  clearenv();
  setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
  setenv("HOME", home, 1);
  snprintf(text, sizeof text, "%.*s", (int)strcspn(r->user, ":"), r->user);
  setenv("USER", text, 1);
  setenv("LANG", "C.UTF-8", 1);
  if (r->flags & WITH_PTY) setenv("TERM", "xterm-256color", 1);
  for (uint32_t i = 0; i < r->envc; i++) putenv(r->env[i]);
  if (!error) {
    execvp(r->argv[0], r->argv);
    error = errno;
  }
  int n = snprintf(text, sizeof text, "%d", error);
  if (write(report, text, n) < 0) {}
  _exit(127);
}

static int open_terminal(struct request *r, int *terminal) {
  int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), unlock = 0;
  struct winsize size = {.ws_row = r->rows, .ws_col = r->columns};
  if (master < 0) return -1;
  ioctl(master, TIOCSPTLCK, &unlock);
  ioctl(master, TIOCSWINSZ, &size);
  *terminal = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
  return master;
}

static void nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

void process_spawn(uint32_t id, const uint8_t *body, uint32_t length) {
  struct request r = {0};
  int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, report[2] = {-1, -1}, error = EINVAL;
  if (!parse(&r, body, length)) {
    wire_end(id, EINVAL);
    goto done;
  }
  struct stream *s = stream_new(id);
  s->type[0] = STDOUT;
  s->type[1] = STDERR;
  s->pty = r.flags & WITH_PTY;
  int bad = pipe2(report, O_CLOEXEC);
  if (s->pty) {
    s->out[0] = s->in = open_terminal(&r, &in[0]);
    out[1] = err[1] = in[0];
    bad |= in[0] < 0;
  } else {
    bad |= pipe2(out, O_CLOEXEC) | pipe2(err, O_CLOEXEC);
    if (r.flags & WITH_STDIN) bad |= pipe2(in, O_CLOEXEC);
    else in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    s->out[0] = out[0];
    s->out[1] = err[0];
    s->in = in[1];
  }
  error = errno;
  memcpy(s->group, next_group, sizeof s->group);
  s->pid = bad ? -1 : fork_into(s->group);
  if (!s->pid) child(&r, in[0], out[1], err[1], report[1]);
  if (s->pid < 0 && !bad) error = errno;
  if (report[1] >= 0) close(report[1]);
  if (in[0] >= 0) close(in[0]);
  if (!s->pty && out[1] >= 0) close(out[1]);
  if (!s->pty && err[1] >= 0) close(err[1]);
  if (s->pid > 0) {
    char text[16] = {0};
    ssize_t n = read(report[0], text, sizeof text - 1);
    error = n > 0 ? atoi(text) : 0;
  }
  if (report[0] >= 0) close(report[0]);
  if (error) {
    s->reported = 1;
    s->discard = 3;
    if (s->pid < 0) s->exited = 1;
    wire_end(id, error);
  } else {
    uint32_t pid = s->pid;
    for (int i = 0; i < 2; i++)
      if (s->out[i] >= 0) nonblocking(s->out[i]);
    if (s->in >= 0) nonblocking(s->in);
    wire_send(STARTED, id, &pid, 4);
  }
  process_prepare();
done:
  free(r.argv);
  free(r.env);
}

void process_stdin(uint32_t id, const uint8_t *body, uint32_t length) {
  struct stream *s = stream_find(id);
  if (!s || s->in < 0) {
    wire_send(TAKEN, id, &length, 4);
    return;
  }
  s->pending = realloc(s->pending, s->pending_length + length + 1);
  memcpy(s->pending + s->pending_length, body, length);
  s->pending_length += length;
  stream_feed(s);
}

void process_stdin_end(uint32_t id) {
  struct stream *s = stream_find(id);
  if (!s) return;
  s->in_ends = 1;
  stream_feed(s);
}

// cgroup.kill reaches every member at once, also while the tree is forking.
void process_kill(uint32_t id, int number) {
  struct stream *s = stream_find(id);
  char path[80], line[32];
  if (!s || !s->pid) return;
  if (s->group[0]) {
    snprintf(path, sizeof path, "%s/cgroup.kill", s->group);
    if (number == SIGKILL && !write_file(path, "1")) return;
    snprintf(path, sizeof path, "%s/cgroup.procs", s->group);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) kill(atoi(line), number);
    if (file) fclose(file);
  } else if (!s->exited) {
    kill(-s->pid, number);
  }
}

void process_resize(uint32_t id, uint32_t rows, uint32_t columns) {
  struct stream *s = stream_find(id);
  struct winsize size = {.ws_row = rows, .ws_col = columns};
  if (s && s->pty && s->in >= 0) ioctl(s->in, TIOCSWINSZ, &size);
}

void process_reap(void) {
  int status;
  pid_t pid;
  while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
    for (struct stream *s = streams; s; s = s->next)
      if (s->pid == pid && !s->exited) {
        s->exited = 1;
        s->status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
}

// Programs in the guest: processes that are neither this one nor threads of the kernel.
int process_count(void) {
  // All programs descend from the first one: without a child there are none, and no page is touched to find out.
  siginfo_t child;
  if (getpid() == 1 && waitid(P_ALL, 0, &child, WEXITED | WNOHANG | WNOWAIT | __WALL) < 0 && errno == ECHILD) return 0;
  DIR *directory = opendir("/proc");
  struct dirent *entry;
  int count = 0;
  while (directory && (entry = readdir(directory))) {
    char path[300], buffer[2];
    if (!isdigit((unsigned char)entry->d_name[0]) || !strcmp(entry->d_name, "1")) continue;
    snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    count += read(fd, buffer, 1) == 1;
    close(fd);
  }
  if (directory) closedir(directory);
  return count;
}
