/* Calls every function of weightrefit.h: `caller DOUBLE`. Silent where all is as the header says. */
#include <stdio.h>
#include <string.h>

#include "weightrefit.h"

#define CHECK(holds) \
    if (!(holds)) { \
        fprintf(stderr, "line %d: %s (%s: %s)\n", __LINE__, #holds, weightrefit_error_code(), weightrefit_error_text()); \
        return 1; \
    }

int main(int count, char **words) {
    weightrefit_executor *executor = (weightrefit_executor *)&count;
    weightrefit_settings settings;
    CHECK(count == 2);
    memset(&settings, 0, sizeof settings);
    CHECK(weightrefit_interface() == WEIGHTREFIT_INTERFACE);
    CHECK(strlen(weightrefit_version()) > 0);
    CHECK(strcmp(weightrefit_error_code(), "") == 0);
    CHECK(weightrefit_start(NULL, &executor) == 1);
    CHECK(weightrefit_start(&settings, NULL) == 1);
    CHECK(weightrefit_start(&settings, &executor) == 1 && executor == NULL);
    CHECK(strstr(weightrefit_error_text(), "another size") != NULL);
    settings.size = sizeof settings;
    CHECK(weightrefit_start(&settings, &executor) == 1 && executor == NULL);
    CHECK(strstr(weightrefit_error_text(), "socket is missing") != NULL);
    settings.socket = "/nowhere/agent.sock";
    CHECK(weightrefit_start(&settings, &executor) == 1);
    CHECK(strstr(weightrefit_error_text(), "seat of the rank is missing") != NULL);
    settings.seat = "training/0";
    settings.cuda_library = settings.nccl_library = words[1];
    CHECK(weightrefit_start(&settings, &executor) == 1 && executor == NULL);
    CHECK(strcmp(weightrefit_error_code(), "PeerLost") == 0);
    CHECK(strstr(weightrefit_error_text(), "no agent at /nowhere/agent.sock") != NULL);
    CHECK(weightrefit_check(NULL) == 1);
    CHECK(weightrefit_stop(NULL) == 0);
    CHECK(strcmp(weightrefit_error_code(), "") == 0);
    return 0;
}
