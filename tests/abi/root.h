/* root.h - a directory for a test's cache, and opening it. */
#ifndef ROOT_H
#define ROOT_H

#include <dirent.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "check.h"

static char root_dir[256];

static void remove_tree(const char *path)
{
    DIR *d = opendir(path);
    struct dirent *entry;
    while (d != NULL && (entry = readdir(d)) != NULL) {
        char child[1024];
        struct stat st;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
        if (lstat(child, &st) == 0 && S_ISDIR(st.st_mode))
            remove_tree(child);
        else
            unlink(child);
    }
    if (d != NULL)
        closedir(d);
    rmdir(path);
}

static pid_t root_owner;

/* Forked children run this, too. */
static void remove_root(void)
{
    if (getpid() == root_owner)
        remove_tree(root_dir);
}

/* Makes root_dir, to be removed at exit. */
static void make_root(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(root_dir, sizeof root_dir, "%s/kvtier-abi-XXXXXX", tmp != NULL ? tmp : "/tmp");
    CHECK(mkdtemp(root_dir) != NULL);
    root_owner = getpid();
    atexit(remove_root);
}

/* Opens a small cache in root_dir with a role. */
static kvt_cache open_cache(const char *role)
{
    char json[512];
    kvt_cache cache = 0;
    snprintf(json, sizeof json,
             "{\"disk_path\": \"%s/kv\", \"dram_gib\": 0.0625, \"disk_gib\": 0.25, \"free_floor_gib\": 0, \"role\": \"%s\"}",
             root_dir, role);
    OK(kvt_open(json, strlen(json), &cache));
    CHECK(cache != 0);
    return cache;
}

static kvt_cache open_leader(void)
{
    kvt_cache cache = open_cache("auto");
    int32_t state;
    OK(kvt_wait_open(cache, 10000));
    OK(kvt_state(cache, &state, NULL, 0));
    CHECK(state == KVT_STATE_LEADER);
    return cache;
}

#endif
