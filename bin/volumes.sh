# Read by the entrypoints of both containers: folders that are mounted can be written to, or one line says what to do.
# qmd's cache and config are volumes of their own, and part of the data tree.

for folder in /var/lib/qmd/cache /var/lib/qmd/config "${MEMGW_DATA_DIR:=/data}"; do
  if [[ ! -d $folder && $folder == /var/lib/qmd/* ]]; then
    continue # outside of a container there is only the data tree
  fi
  # A folder of another user's in there would stop a request later, which can say less. lost+found is the file
  # system's, a repository may be a remote.
  odd=$(find -L "$folder" -maxdepth 1 -type d ! -name lost+found ! -name '*.git' ! -writable -print -quit 2>/dev/null) ||
    odd=$folder
  if [[ -n $odd ]]; then
    us=$(id -u):$(id -g)
    printf "memgw: %s: user %s can't write there, it is %s's: %s\n" "$odd" "$us" \
      "$(stat -Lc %u:%g "$odd" 2>/dev/null || echo nobody)" \
      "chown -R $us what is mounted on $folder, or set MEMGW_UID and MEMGW_GID in .env to its owner and build again" >&2
    exit 1
  fi
done

for name in cache config; do
  # Both containers start at once: whoever comes second finds the link.
  if [[ -d /var/lib/qmd/$name && ! -e $MEMGW_DATA_DIR/qmd-$name ]]; then
    ln -sT "/var/lib/qmd/$name" "$MEMGW_DATA_DIR/qmd-$name" 2>/dev/null || [[ -e $MEMGW_DATA_DIR/qmd-$name ]]
  fi
done
