use super::*;
use crate::spans::LoadSpan;

const RESNET: ModelKey = ModelKey::new(0, 1);
const BERT: ModelKey = ModelKey::new(1, 1);

fn us(micros: u64) -> Nanos {
    Nanos::from_micros(micros)
}

fn name(model: ModelKey) -> String {
    if model == RESNET { "resnet".to_string() } else { "bert".to_string() }
}

fn request(number: u64, class: Class, times: [u64; 4]) -> RequestSpan {
    let [arrived, staged, started, answered] = times.map(us);
    RequestSpan {
        number,
        job: number,
        model: if class == Class::RealTime { RESNET } else { BERT },
        class,
        priority: 1,
        rows: 0,
        arrived,
        staged,
        started,
        answered,
        deadline: Nanos::MAX,
        end: End::Done,
    }
}

fn run(of: &RequestSpan, began: u64, ended: u64) -> RunSpan {
    RunSpan {
        job: of.job,
        model: of.model,
        class: of.class,
        queue: 0,
        rows: of.rows,
        first_step: 0,
        next_step: 10,
        step_count: 10,
        began: us(began),
        ended: us(ended),
        preempt_requested: Nanos::ZERO,
        preempted_for: None,
        end: RunEnd::Done,
    }
}

fn cut(of: &RequestSpan, began: u64, asked: u64, ended: u64, step: u32) -> RunSpan {
    RunSpan {
        preempt_requested: us(asked),
        preempted_for: Some(RESNET),
        end: RunEnd::Preempted,
        next_step: step,
        ..run(of, began, ended)
    }
}

/// Explains, and checks that the parts are all of the time.
fn explained(request: &RequestSpan, spans: &[Span]) -> Explanation {
    let explanation = explain(request, spans, &name);
    let sum = explanation.parts.iter().map(|part| part.time).sum_nanos();
    assert_eq!(sum, explanation.total, "{explanation:#?}");
    explanation
}

#[test]
fn a_request_on_an_idle_device_computes() {
    let real_time = request(1, Class::RealTime, [100, 110, 112, 1_000]);
    let spans = [Span::Run(run(&real_time, 112, 990))];
    let explanation = explained(&real_time, &spans);
    assert_eq!(
        explanation.sentence,
        "It took 900 us, 878 us of it (98 %) computing; the rest: 10.0 us staging its inputs, \
         2.00 us waiting to be started and 10.0 us until its reply."
    );
}

#[test]
fn a_real_time_request_names_what_it_waited_behind() {
    let first = request(1, Class::RealTime, [0, 0, 0, 3_000]);
    let second = RequestSpan { job: 2, number: 2, ..first };
    let waiting = request(3, Class::RealTime, [500, 500, 5_000, 6_000]);
    let spans = [
        Span::Run(run(&first, 0, 3_000)),
        Span::Run(run(&second, 3_000, 5_000)),
        Span::Run(run(&waiting, 5_000, 6_000)),
        Span::Request(first),
    ];
    let explanation = explained(&waiting, &spans);
    assert_eq!(
        explanation.sentence,
        "It took 5.50 ms, 4.50 ms of it (82 %) behind 2 real-time runs of 'resnet'; the rest: \
         1.00 ms computing."
    );
}

#[test]
fn leaving_counts_from_the_preemption_on() {
    let best_effort = request(1, Class::BestEffort, [0, 0, 0, 9_000]);
    let real_time = request(2, Class::RealTime, [1_000, 1_010, 1_050, 2_000]);
    let spans = [
        Span::Run(cut(&best_effort, 0, 1_010, 1_050, 4)),
        Span::Run(run(&real_time, 1_050, 2_000)),
        Span::Run(run(&best_effort, 2_000, 9_000)),
    ];
    let explanation = explained(&real_time, &spans);
    assert_eq!(explanation.preempted, [1]);
    let leaving = explanation.parts.iter().find(|part| part.kind == PartKind::Leaving);
    assert_eq!(leaving.map(|part| part.time), Some(us(40)));
    assert!(explanation.sentence.contains("until best effort of 'bert' had left the device"));
}

#[test]
fn a_preempted_request_says_for_whom_and_where_it_resumed() {
    let best_effort = request(1, Class::BestEffort, [0, 0, 0, 9_000]);
    let real_time = request(2, Class::RealTime, [1_000, 1_010, 1_050, 2_000]);
    let spans = [
        Span::Run(cut(&best_effort, 0, 1_010, 1_050, 4)),
        Span::Run(run(&real_time, 1_050, 2_000)),
        Span::Run(run(&best_effort, 2_000, 9_000)),
    ];
    let explanation = explained(&best_effort, &spans);
    assert_eq!(
        explanation.sentence,
        "It took 9.00 ms, 8.05 ms of it (89 %) computing in 2 parts; the rest: 950 us behind \
         1 real-time run of 'resnet'. It was preempted once for 'resnet'; it left the device after \
         40.0 us, and resumed last at step 4 of 10."
    );
}

#[test]
fn what_was_cut_for_good_did_not_resume() {
    for (end, opening) in [
        (End::Cancelled, "Its client gave it up after 3.00 ms"),
        (End::DeadlineExceeded, "Its deadline passed after 3.00 ms"),
    ] {
        let mut best_effort = request(1, Class::BestEffort, [0, 0, 0, 3_000]);
        best_effort.end = end;
        let real_time = request(2, Class::RealTime, [1_000, 1_010, 1_050, 9_000]);
        let spans = [
            Span::Run(cut(&best_effort, 0, 1_010, 1_050, 4)),
            Span::Run(run(&real_time, 1_050, 9_000)),
        ];
        let explanation = explained(&best_effort, &spans);
        assert_eq!(
            explanation.sentence,
            format!(
                "{opening}, 1.95 ms of it (65 %) behind 1 real-time run of 'resnet'; the rest: \
                 1.05 ms computing. It was preempted once for 'resnet'; it left the device after \
                 40.0 us at step 4 of 10, and did not resume."
            )
        );
    }
}

#[test]
fn what_was_cut_again_resumed_only_before() {
    let mut best_effort = request(1, Class::BestEffort, [0, 0, 0, 6_000]);
    best_effort.end = End::Cancelled;
    let spans = [
        Span::Run(cut(&best_effort, 0, 1_010, 1_050, 4)),
        Span::Run(cut(&best_effort, 2_000, 3_000, 3_100, 7)),
    ];
    let sentence = explained(&best_effort, &spans).sentence;
    let end = "It was preempted 2 times for 'resnet'; it left the device after 100 us at most, \
               last at step 7 of 10, and did not resume there.";
    assert!(sentence.ends_with(end), "{sentence}");
}

#[test]
fn what_was_stopped_because_it_was_given_up_says_so() {
    let mut best_effort = request(1, Class::BestEffort, [0, 0, 0, 3_000]);
    best_effort.end = End::Cancelled;
    let stopped =
        |began| RunSpan { preempted_for: None, ..cut(&best_effort, began, 3_000, 3_050, 6) };
    let sentence = explained(&best_effort, &[Span::Run(stopped(0))]).sentence;
    let end = "computing. It was stopped at step 6 of 10, and left the device after 50.0 us.";
    assert!(sentence.ends_with(end), "{sentence}");
    // It had resumed from a preemption before.
    let spans = [Span::Run(cut(&best_effort, 0, 1_010, 1_050, 4)), Span::Run(stopped(2_000))];
    let sentence = explained(&best_effort, &spans).sentence;
    let end = "It was preempted once for 'resnet'; it left the device after 40.0 us, and resumed \
               last at step 4 of 10. It was stopped at step 6 of 10, and left the device after \
               50.0 us.";
    assert!(sentence.ends_with(end), "{sentence}");
}

#[test]
fn batch_members_are_named() {
    let mut first = request(1, Class::RealTime, [0, 5, 200, 400]);
    (first.job, first.rows) = (9, 3);
    let others = [2, 3].map(|number| RequestSpan { number, ..first });
    let spans = [
        Span::Run(run(&first, 200, 400)),
        Span::Request(first),
        Span::Request(others[0]),
        Span::Request(others[1]),
    ];
    let explanation = explained(&first, &spans);
    assert_eq!(explanation.members, [2, 3]);
    assert!(explanation.sentence.contains("waiting for its batch"), "{}", explanation.sentence);
    assert!(explanation.sentence.contains("in a batch of 3 rows with 2 other requests"));
}

#[test]
fn weights_that_are_loaded_are_named_first() {
    let waiting = request(1, Class::RealTime, [0, 0, 5_000, 6_000]);
    let other = request(2, Class::BestEffort, [0, 0, 0, 4_000]);
    let spans = [
        Span::Load(LoadSpan {
            model: RESNET,
            began: us(0),
            ended: us(5_000),
            bytes: 1 << 20,
            urgent: true,
            failed: false,
        }),
        Span::Run(run(&other, 0, 4_000)),
        Span::Run(run(&waiting, 5_000, 6_000)),
    ];
    let explanation = explained(&waiting, &spans);
    assert!(explanation.sentence.contains("(83 %) loading its weights"));
}

#[test]
fn what_never_ran_says_what_it_waited_for() {
    let mut late = request(3, Class::BestEffort, [0, 10, 0, 1_000]);
    (late.job, late.started, late.end) = (0, Nanos::ZERO, End::DeadlineExceeded);
    let other = request(1, Class::RealTime, [0, 0, 0, 2_000]);
    let explanation = explained(&late, &[Span::Run(run(&other, 0, 2_000))]);
    assert_eq!(
        explanation.sentence,
        "Its deadline passed after 1.00 ms, 990 us of it (99 %) behind 1 real-time run of \
         'resnet'; the rest: 10.0 us staging its inputs."
    );
    let mut refused = request(4, Class::BestEffort, [5, 5, 0, 5]);
    (refused.job, refused.started, refused.end) = (0, Nanos::ZERO, End::QueueFull);
    let explanation = explained(&refused, &[]);
    assert_eq!(explanation.sentence, "It was refused after 0 ns: the queue was full.");
}

#[test]
fn runs_that_are_no_longer_recorded_count_as_computing() {
    let real_time = request(1, Class::RealTime, [0, 10, 20, 100]);
    let explanation = explained(&real_time, &[]);
    assert!(explanation.sentence.contains("80.0 us of it (80 %) computing"));
    assert!(explanation.runs.is_empty());
}
