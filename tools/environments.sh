# What the scripts that make environments share; sourced by them. With ``printed=true`` commands are printed, not run.
printed=false

# usage SCRIPT: the first paragraph of the script's comment, and exit 2.
usage() {
  sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$1" >&2
  exit 2
}

# folder_of SCRIPT ARGUMENTS: the one argument that is left, a folder.
folder_of() {
  if [ $# -ne 2 ] || [ -z "$2" ] || [ "${2:0:1}" = - ]; then usage "$1"; fi
  case $2 in /*) echo "$2" ;; *) echo "$PWD/$2" ;; esac
}

# do_ COMMAND: runs it, or prints it so that a shell would run it.
do_() {
  if $printed; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

# make_venv FOLDER
make_venv() {
  local python=${PYTHON:-$(command -v python3.11 || command -v python3)}
  "$python" -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vcpo: error: Python 3.11 or newer is needed; set PYTHON=")'
  do_ "$python" -m venv "$1"
}

# install FOLDER ARGUMENTS: pip in the environment.
install() {
  local folder=$1
  shift
  do_ "$folder/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}

# site_of FOLDER: where its packages lie.
site_of() {
  local python=${PYTHON:-$(command -v python3.11 || command -v python3)}
  echo "$1/lib/$("$python" -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')/site-packages"
}
