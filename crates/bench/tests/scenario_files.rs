//! Files of scenarios: every value is checked, and a bad one named with its line.

use std::path::Path;

use bench::scenario::Scenario;

const GOOD: &str = "seconds = 1.0\n[[clients]]\nname = 'c'\nmodel = 'vgg19'\nclass = 'rt'\n\
                    deadline_ms = 20\narrival = { kind = 'poisson', rate = 10.0 }\n";

#[test]
fn every_bad_value_is_named_with_its_line() {
    assert!(Scenario::from_toml("f", GOOD).is_ok());
    let arrival =
        |text: &str| GOOD.replace("{ kind = 'poisson', rate = 10.0 }", &format!("{{ {text} }}"));
    // The first five ran for ever.
    for (bad, line, field) in [
        (arrival("kind = 'poisson', rate = 0.0"), 7, "clients[0].arrival.rate"),
        (arrival("kind = 'uniform', rate = nan"), 7, "clients[0].arrival.rate"),
        (arrival("kind = 'uniform', rate = inf"), 7, "clients[0].arrival.rate"),
        (arrival("kind = 'poisson', rate = -1.0"), 7, "clients[0].arrival.rate"),
        (
            arrival("kind = 'diurnal', rate = 1.0, swing = 0.5, day_s = 0.0"),
            7,
            "clients[0].arrival.day_s",
        ),
        (
            arrival("kind = 'diurnal', rate = 1.0, swing = 1.5, day_s = 1.0"),
            7,
            "clients[0].arrival.swing",
        ),
        (
            arrival("kind = 'on_off', rate = 1.0, on_ms = 0.0, off_ms = 1.0"),
            7,
            "clients[0].arrival.on_ms",
        ),
        (arrival("kind = 'trace', times_ms = [1.0, 0.5]"), 7, "clients[0].arrival.times_ms[1]"),
        (GOOD.replace("deadline_ms = 20", "deadline_ms = -1.0"), 6, "clients[0].deadline_ms"),
        (GOOD.replace("deadline_ms = 20", "priority = 0"), 6, "clients[0].priority"),
        (GOOD.replace("deadline_ms = 20", "cancel_percent = 101"), 6, "cancel_percent"),
        (GOOD.replace("seconds = 1.0", "seconds = nan"), 1, "seconds"),
        (GOOD.replace("seconds = 1.0", "seconds = 0.0"), 1, "seconds"),
        (GOOD.replace("seconds = 1.0", "level = 9"), 1, "level"),
        (GOOD.replace("seconds = 1.0", "name = \"a\\tb\""), 1, "name = \"a\\tb\""),
        (GOOD.replace("'c'", "''"), 3, "clients[0].name"),
        (GOOD.replace("'c'", "\"c\\u001b[2J\""), 3, "clients[0].name = \"c\\u{1b}[2J\""),
        (GOOD.replace("'c'", &format!("'{}'", "c".repeat(257))), 3, "clients[0].name"),
        (GOOD.replace("'vgg19'", "''"), 4, "clients[0].model"),
        (
            format!("{GOOD}{}", GOOD.trim_start_matches("seconds = 1.0\n")),
            9,
            "clients[1].name = \"c\" is there twice",
        ),
        (GOOD.replace("seconds = 1.0", "memory_mb = 99999999999999"), 1, "memory_mb"),
        ("seconds = 1.0\n".to_string(), 1, "clients"),
        (format!("{GOOD}[[faults]]\nat_ms = -1.0\nkind = 'device_reset'\n"), 9, "at_ms"),
        (
            format!("{GOOD}[[faults]]\nat_ms = 1.0\nkind = 'slow_kernel'\nfactor = nan\n"),
            11,
            "faults[0].factor",
        ),
        (
            format!("{GOOD}[[faults]]\nat_ms = 1.0\nkind = 'device_reset'\nfactor = 2.0\n"),
            11,
            "faults[0].factor is not known",
        ),
    ] {
        let error = Scenario::from_toml("f.toml", &bad).unwrap_err().to_string();
        let wanted = format!("f.toml, line {line}: ");
        assert!(error.contains(&wanted) && error.contains(field), "{error}\n{bad}");
    }
    let error = Scenario::from_toml("f", &GOOD.replace("seconds", "second")).unwrap_err();
    assert!(error.to_string().contains("line 1"), "{error}");
}

#[test]
fn the_files_of_the_repository_are_good() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    for name in ["two_classes", "faults", "memory"] {
        Scenario::read(&folder.join(format!("{name}.toml"))).unwrap();
    }
}
