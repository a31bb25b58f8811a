// Runs a program with as little as it needs, in one step and without a process in between:
//   confine UID FILE_SIZE ADDRESS_SPACE OPEN_FILES NETNS [-r PATH | -w PATH]... -- PROGRAM ARGUMENTS...
// UID -1 keeps the caller's user, in a user namespace of its own. NETNS "-" is a new, empty network namespace.
// -r, -w: what may be read (and executed), what may be written too; nothing else in the file system can be opened.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/landlock.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Noreturn void fail(const char *what) {
  fprintf(stderr, "confine: %s: %s\n", what, strerror(errno));
  exit(126);
}

static void limit(int resource, const char *text, const char *what) {
  rlim_t most = strtoull(text, 0, 10);
  if (setrlimit(resource, &(struct rlimit){most, most})) fail(what);
}

static void put(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) fail(path);
  close(fd);
}

static void own_namespaces(int unprivileged, const char *network) {
  char map[64];
  uid_t uid = getuid();
  gid_t gid = getgid();
  if (strcmp(network, "-")) {
    int fd = open(network, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET)) fail(network);
    close(fd);
  }
  int flags = CLONE_NEWIPC | CLONE_NEWUTS | (strcmp(network, "-") ? 0 : CLONE_NEWNET);
  if (unshare(flags | (unprivileged ? CLONE_NEWUSER : 0))) fail("namespaces");
  if (!unprivileged) return;
  put("/proc/self/setgroups", "deny");
  snprintf(map, sizeof map, "%u %u 1", uid, uid);
  put("/proc/self/uid_map", map);
  snprintf(map, sizeof map, "%u %u 1", gid, gid);
  put("/proc/self/gid_map", map);
}

static void become(uid_t uid) {
  struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  struct __user_cap_data_struct none[2] = {{0}};
  for (int cap = 0; prctl(PR_CAPBSET_READ, cap) >= 0; cap++)
    if (prctl(PR_CAPBSET_DROP, cap)) fail("capabilities");
  if (uid != (uid_t)-1 && (setgroups(0, 0) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))) fail("user");
  if (syscall(SYS_capset, &header, none)) fail("capabilities");
}

#define READS (LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR)
#define WRITES (LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_REMOVE_FILE | LANDLOCK_ACCESS_FS_MAKE_REG | \
  LANDLOCK_ACCESS_FS_MAKE_SOCK)
#define REST (LANDLOCK_ACCESS_FS_REMOVE_DIR | LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_DIR | \
  LANDLOCK_ACCESS_FS_MAKE_FIFO | LANDLOCK_ACCESS_FS_MAKE_BLOCK | \
  LANDLOCK_ACCESS_FS_MAKE_SYM)

static int rules(void) {
  struct landlock_ruleset_attr attr = {.handled_access_fs = READS | WRITES | REST};
  return syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
}

static void allow(int ruleset, const char *path, int writes) {
  struct landlock_path_beneath_attr attr = {.allowed_access = READS | (writes ? WRITES : 0)};
  if (ruleset < 0) return;
  attr.parent_fd = open(path, O_PATH | O_CLOEXEC);
  if (attr.parent_fd < 0) fail(path);
  int file = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &attr, 0);
  if (file && errno == EINVAL) {  // not a directory: only what a file can have
    attr.allowed_access &= LANDLOCK_ACCESS_FS_EXECUTE | LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_WRITE_FILE;
    file = syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &attr, 0);
  }
  if (file) fail(path);
  close(attr.parent_fd);
}

int main(int argc, char **argv) {
  if (argc < 8) {
    fprintf(stderr, "confine: UID FILE_SIZE ADDRESS_SPACE OPEN_FILES NETNS [-r PATH | -w PATH]... -- PROGRAM\n");
    return 126;
  }
  pid_t parent = getppid();
  uid_t uid = atoi(argv[1]);
  own_namespaces(uid == (uid_t)-1 && geteuid(), argv[5]);
  int ruleset = rules(), i = 6;
  for (; i + 1 < argc && strcmp(argv[i], "--"); i += 2) allow(ruleset, argv[i + 1], !strcmp(argv[i], "-w"));
  limit(RLIMIT_FSIZE, argv[2], "file size");
  limit(RLIMIT_AS, argv[3], "address space");
  limit(RLIMIT_NOFILE, argv[4], "open files");
  limit(RLIMIT_CORE, "0", "core");
  // Huge pages would make every machine's code cache private in steps of 2 MB.
  prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  become(uid);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no new privileges");
  if (ruleset >= 0 && syscall(SYS_landlock_restrict_self, ruleset, 0)) fail("landlock");
  // After the change of user, which would clear it.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent) fail("parent");
  execv(argv[i + 1], argv + i + 1);
  fail(argv[i + 1]);
}
