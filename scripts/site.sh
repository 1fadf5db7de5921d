#!/usr/bin/env bash
# Builds the page site into build/site, or FASTP3O_SITE: the repository's pages and the reference of what is public.
# A warning, or a link that leads nowhere, fails it. An interpreter of FASTP3O_PYTHON needs only what the extra `site` names.
set -euo pipefail
FASTP3O_EXTRAS="${FASTP3O_EXTRAS:-site}"
source "$(dirname "$0")/setup.sh"
folder="$(realpath -m "${FASTP3O_SITE:-build/site}")"
NO_MKDOCS_2_WARNING=1 "$PYTHON" -m mkdocs build --strict --config-file .github/site/mkdocs.yml --site-dir "$folder"
"$PYTHON" .github/site/links.py "$folder"
