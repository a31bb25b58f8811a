// From the kernel's first process to a guest with a root file system: modules, mounts, network addresses.
#define _GNU_SOURCE
#include "agent.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <net/route.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CONTAINERS "/merged/var/lib/containers"

static void load_modules(void) {
  struct dirent **names;
  int count = scandir("/modules", &names, 0, alphasort);
  for (int i = 0; i < count; i++) {
    char path[300];
    snprintf(path, sizeof path, "/modules/%s", names[i]->d_name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && names[i]->d_name[0] != '.' && syscall(SYS_finit_module, fd, "", 0)) perror(path);
    if (fd >= 0) close(fd);
  }
}

static int wait_for(const char *path) {
  for (int i = 0; i < 1000; i++) {
    if (!access(path, F_OK)) return 1;
    usleep(2000);
  }
  return 0;
}

// The read-only root below, the writable disk above it.
static void mount_root(void) {
  if (!wait_for("/dev/vda")) return;
  mkdir("/lower", 0755);
  mkdir("/upper", 0755);
  mkdir("/merged", 0755);
  if (mount("/dev/vda", "/lower", "squashfs", MS_RDONLY, 0)) return perror("root");
  if (mount("/dev/vdb", "/upper", "ext4", MS_NOATIME, "nobarrier")) return perror("disk");
  mkdir("/upper/files", 0755);
  mkdir("/upper/work", 0755);
  if (mount("overlay", "/merged", "overlay", MS_NOATIME, "lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work"))
    return perror("overlay");
  // An overlay cannot be written on an overlay: containers of the guest have a folder of the disk itself.
  mkdir("/upper/containers", 0711);
  if (make_parents(CONTAINERS "/") || mount("/upper/containers", CONTAINERS, 0, MS_BIND, 0)) perror(CONTAINERS);
  if (chdir("/merged") || mount(".", "/", 0, MS_MOVE, 0) || chroot(".") || chdir("/")) perror("chroot");
}

// The gateway knows the names that a policy allows. Without a network nobody is asked: the gateway is unreachable then.
static void name_server(void) {
  static const char text[] = "nameserver 192.0.2.1\n";
  int fd = open("/run/resolv.conf", O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || write(fd, text, sizeof text - 1) < 0) perror("resolv.conf");
  if (fd >= 0) close(fd);
  if (access("/etc/resolv.conf", F_OK)) {  // not there, or a link to a service that does not run here
    unlink("/etc/resolv.conf");
    if ((fd = open("/etc/resolv.conf", O_WRONLY | O_CREAT | O_CLOEXEC, 0644)) >= 0) close(fd);
  }
  if (mount("/run/resolv.conf", "/etc/resolv.conf", 0, MS_BIND, 0)) perror("/etc/resolv.conf");
}

static void mount_all(void) {
  static const char *const table[][4] = {
      {"proc", "/proc", "proc", ""},
      {"sysfs", "/sys", "sysfs", ""},
      {"devtmpfs", "/dev", "devtmpfs", ""},
      {"devpts", "/dev/pts", "devpts", "mode=620,ptmxmode=666"},
      {"tmpfs", "/dev/shm", "tmpfs", "mode=1777"},
      {"tmpfs", "/run", "tmpfs", "mode=755"},
      {"cgroup2", "/sys/fs/cgroup", "cgroup2", "nsdelegate"},
  };
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    mkdir(table[i][1], 0755);
    if (mount(table[i][0], table[i][1], table[i][2], MS_NOSUID, table[i][3])) perror(table[i][1]);
  }
  // The machine's id is another one after every restore: in memory, so that writing it costs nothing.
  int fd = open("/run/machine-id", O_WRONLY | O_CREAT | O_CLOEXEC, 0444);
  if (fd >= 0) close(fd);
  if (!access("/etc/machine-id", F_OK)) mount("/run/machine-id", "/etc/machine-id", 0, MS_BIND, 0);
  name_server();
  mkdir("/tmp", 01777);
  chmod("/tmp", 01777);
  mkdir("/root", 0700);
  fd = open("/sys/fs/cgroup/cgroup.subtree_control", O_WRONLY | O_CLOEXEC);
  if (fd >= 0 && write(fd, "+pids", 5) < 0) perror("pids");
  if (fd >= 0) close(fd);
  if (symlink("/proc/self/fd", "/dev/fd") || symlink("/proc/self/fd/0", "/dev/stdin") ||
      symlink("/proc/self/fd/1", "/dev/stdout") || symlink("/proc/self/fd/2", "/dev/stderr"))
    perror("/dev/fd");
}

static void bring_up(int s, const char *name) {
  struct ifreq request = {0};
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
  if (ioctl(s, SIOCGIFFLAGS, &request)) return;
  request.ifr_flags |= IFF_UP | IFF_RUNNING;
  ioctl(s, SIOCSIFFLAGS, &request);
}

static void set_address(struct sockaddr *place, const char *text) {
  struct sockaddr_in address = {.sin_family = AF_INET};
  inet_pton(AF_INET, text, &address.sin_addr);
  memcpy(place, &address, sizeof address);
}

void configure_network(const char *address, const char *gateway) {
  struct ifreq request = {.ifr_name = "eth0"};
  struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  set_address(&request.ifr_addr, address);
  ioctl(s, SIOCSIFADDR, &request);
  set_address(&request.ifr_netmask, "255.255.255.252");
  ioctl(s, SIOCSIFNETMASK, &request);
  bring_up(s, "eth0");
  set_address(&route.rt_gateway, gateway);
  set_address(&route.rt_dst, "0.0.0.0");
  set_address(&route.rt_genmask, "0.0.0.0");
  ioctl(s, SIOCADDRT, &route);
  close(s);
}

void boot(void) {
  mkdir("/proc", 0755);
  mkdir("/dev", 0755);
  mount("proc", "/proc", "proc", 0, "");
  mount("devtmpfs", "/dev", "devtmpfs", 0, "");
  load_modules();
  mount_root();
  mount_all();
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (s >= 0) {
    bring_up(s, "lo");
    close(s);
  }
  if (sethostname("sandbox", 7)) perror("hostname");
}
